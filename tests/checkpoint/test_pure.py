"""Shares, names, layouts, nested state: what needs no store."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from torch import nn

from varuna.checkpoint.errors import DamagedCheckpoint, StateError
from varuna.checkpoint.layout import TensorForm, header_size, lay_out, parse_header
from varuna.checkpoint.names import job_name, optimizer_name, split_name
from varuna.checkpoint.shares import owners, planned_shares, reassign, shares
from varuna.checkpoint.tree import flatten, tensor_names, unflatten

# --- shares ---------------------------------------------------------------------------------

sizes = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 1000), max_size=30)
workers = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)


@given(sizes, workers, st.integers(1, 3))
def test_every_tensor_is_written_once_and_evenly(sizes, holders, num_copies):
    planned = shares(sizes, holders, num_copies=num_copies)
    assert Counter(name for share in planned.values() for name in share.write) == Counter(list(sizes))
    assert planned == shares(sizes, list(reversed(holders)), num_copies=num_copies)
    loads = [sum(sizes[name] for name in share.write) for share in planned.values()]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    copies = Counter(name for share in planned.values() for name in (*share.write, *share.keep))
    assert all(copies[name] == min(num_copies, len(holders)) for name in sizes)
    assert all(not set(share.write) & set(share.keep) for share in planned.values())


@given(st.lists(st.tuples(sizes, workers), min_size=1, max_size=5))
def test_workers_agree_although_each_knows_only_its_own_sections(groups):
    by_section = {i: {f"{i}/{name}": size for name, size in s.items()} for i, (s, _) in enumerate(groups)}
    holders = {i: tuple(members) for i, (_, members) in enumerate(groups)}
    everyone = sorted({worker for members in holders.values() for worker in members})
    planned = {}
    for worker in everyone:
        held = {i: by_section[i] for i in by_section if worker in holders[i]}
        planned[worker] = planned_shares(worker, held, holders)
    written = Counter(name for worker in everyone for name in planned[worker][worker].write)
    assert written == Counter(name for names in by_section.values() for name in names)
    for dead in everyone:
        alive = [worker for worker in everyone if worker != dead]
        heirs = Counter(
            name for worker in alive for name in reassign(planned[worker], alive).write.get(worker, ())
        )
        owed = planned[dead][dead].write
        kept = [name for name in owed if any(name in planned[w][w].keep for w in alive)]
        assert heirs == Counter(kept)
        assert set(kept) == {n for n in owed if len(set(holders[int(n.split("/")[0])])) > 1}


def test_reassign_leaves_out_what_is_durable():
    planned = shares({"a": 1, "b": 1, "c": 1, "d": 1}, [0, 1])
    owed = planned[1].write
    assert reassign(planned, alive=[0]).write == {0: owed}
    assert reassign(planned, alive=[0], done=owed[:1]).write == {0: owed[1:]}
    assert reassign(planned, alive=[0], done=owed) == reassign(planned, alive=[0, 1])


def test_owners_of_tied_names():
    assert owners([("a", "b"), ("c", "a"), ("b", "d")]) == {"a": 0, "b": 0, "c": 1, "d": 2}


# --- names and files ------------------------------------------------------------------------


@given(st.text("a/%2F.", min_size=1), st.text("k/%", min_size=1))
def test_names_divide_in_one_way(name, key):
    assert split_name(optimizer_name(name, key)) == ("optimizer", name, key)
    assert split_name(job_name(name, key)) == ("job", name, key)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def test_the_library_reads_what_is_laid_out_here():
    torch.manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        for shape in [(), (3,), (2, 0), (5, 7)]:
            values = torch.randint(0, 2, shape) if dtype is torch.bool else torch.randn(shape) * 3
            tensors[f"{dtype} {shape} ü"] = values.abs().to(dtype)
    forms = [
        TensorForm(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))
        for name, value in tensors.items()
    ]
    layout = lay_out(forms, {"format": "pt"})
    assert len(layout.header) % 8 == 0
    payload = bytearray(layout.payload_bytes)
    for item in layout.tensors:
        raw = tensors[item.form.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        payload[item.begin : item.end] = raw
    read = load_safetensors(layout.header + bytes(payload))
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        assert read[name].shape == value.shape
        assert read[name].reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8)), name
    assert parse_header(layout.header) == layout.tensors
    assert header_size(layout.header[:8]) == len(layout.header)


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype":"F32","shape":[2],"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}',
        '{"dtype":"X9","shape":[1],"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[1]}',
        '{"dtype":"F32","shape":[true],"data_offsets":[0,4]}',
        "7",
    ],
)
def test_a_hostile_header_is_an_error(entry):
    text = f'{{"a":{entry}}}'.encode()
    with pytest.raises(ValueError, match="a"):
        parse_header(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="is none of a safetensors file"):
        header_size(b"\xff" * 8)
    with pytest.raises(ValueError, match="too few"):
        header_size(b"123")


# --- nested state ---------------------------------------------------------------------------

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.dictionaries(st.sampled_from(["$", "a"]), inner)
        | st.dictionaries(st.integers(), inner).map(OrderedDict)
        | st.lists(inner).map(deque)
    ),
    max_leaves=15,
)


def round_trip(value):
    flat = flatten(value, lambda index: f"job/x/{index}", "x")
    raw = msgspec.json.decode(msgspec.json.encode(flat.json))
    assert set(tensor_names(raw)) == set(flat.tensors)
    return unflatten(raw, flat.tensors, "x")


@given(plain)
def test_nested_state_comes_back_equal_and_of_the_same_types(value):
    assert repr(round_trip(value)) == repr(value)


def test_the_kinds_that_state_dicts_hold():
    value = {
        "milestones": Counter({30: 1, 80: 2}),
        "default": defaultdict(list, {"a": [1]}),
        "window": deque([1, 2], maxlen=2),
        "set": {3, 1},
        "frozen": frozenset({"a"}),
        "big": 2**200,
        "nan": [math.nan, -math.inf],
        "numpy": [np.float64(0.1), np.int32(-3), np.bool_(True), np.float16("nan")],
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        7: "number as key",
    }
    read = round_trip(value)
    assert repr(read) == repr(value)
    assert [type(item) for item in read["numpy"]] == [np.float64, np.int32, np.bool_, np.float16]
    assert read["default"]["new"] == []
    arrays = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "zero": np.array(5.0),
        "big-endian": np.arange(3, dtype=">f4"),
        "tensor": torch.tensor([1.5], dtype=torch.bfloat16),
        "generator": torch.Generator().manual_seed(3).get_state(),
    }
    read = round_trip(arrays)
    for name, expected in arrays.items():
        assert type(read[name]) is type(expected)
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(read[name], expected)
            assert read[name].shape == expected.shape
        else:
            assert torch.equal(read[name], expected)


def test_the_state_of_torchs_own_schedulers_survives():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    for scheduler in (
        schedulers.MultiStepLR(optimizer, [2, 4, 4]),
        schedulers.CosineAnnealingLR(optimizer, 10),
        schedulers.OneCycleLR(optimizer, 0.1, total_steps=10),
        schedulers.CyclicLR(optimizer, 0.1, 0.2),
        schedulers.ReduceLROnPlateau(optimizer),
        schedulers.SequentialLR(
            optimizer,
            [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)],
            milestones=[3],
        ),
    ):
        state = scheduler.state_dict()
        assert repr(round_trip(state)) == repr(state), type(scheduler).__name__


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"hooks": [len]}, r"x\['hooks'\]\[0\] is a builtins.builtin_function_or_method"),
        ([(1, Thing())], r"x\[0\]\[1\] is a tests.checkpoint.test_pure.Thing"),
        ({"a": {Thing(): 1}}, r"a key of x\['a'\] is a "),
        (nn.Linear(1, 1), r"x is a torch.nn.modules.linear.Linear"),
        ({"o": np.array([Thing()])}, r"x\['o'\] is a NumPy value of type object"),
        ({"m": torch.empty(1, device="meta")}, r"x\['m'\] is a tensor of .* on meta"),
        ([torch.ones(2, 2).to_sparse()], r"x\[0\] is a tensor of .*layout torch.sparse_coo"),
    ],
)
def test_what_only_pickle_could_store_is_refused_with_the_path_to_it(value, path):
    with pytest.raises(StateError, match=path):
        flatten(value, str, "x")


def test_what_contains_itself_is_refused():
    loop: list[object] = []
    loop.append({"again": loop})
    with pytest.raises(StateError, match=r"x\[0\]\['again'\] contains itself"):
        flatten(loop, str, "x")
    twice = [1]
    assert round_trip([twice, twice]) == [[1], [1]]


@pytest.mark.parametrize(
    "raw",
    [
        {"$": "tensor", "name": "gone"},
        {"$": "no such kind"},
        {"$": "numpy", "dtype": "O", "data": "AAAA"},
        {"$": "dtype", "value": "load"},
        {"$": "defaultdict", "of": "eval", "items": []},
        {"$": "dict"},
        {"$": "int", "value": "x"},
        {"$": ["tensor"]},
    ],
)
def test_hostile_state_is_an_error_and_runs_nothing(raw):
    with pytest.raises(DamagedCheckpoint, match="The stored state of x cannot be read"):
        unflatten(raw, {}, "x")


# --- without torch --------------------------------------------------------------------------


def test_what_the_manager_and_the_command_use_imports_no_torch():
    modules = "commit find verify export shares store_file store_fsspec manifest retention names values layout"
    lines = [f"import varuna.checkpoint.{name}" for name in modules.split()]
    code = "\n".join([*lines, "import varuna.cli.checkpoint, sys", "sys.exit('torch' in sys.modules)"])
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
