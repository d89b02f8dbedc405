"""What one worker of an exactness test does: train a case with Varuna, write down what came out.

``state.safetensors`` (worker 0) is ``job.full_state_dict()``; ``steps-<rank>.json`` the numbers of every step.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import safetensors.torch
import torch
import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral
import transformers.models.t5.modeling_t5
import transformers.models.vit.modeling_vit
import transformers.models.whisper.modeling_whisper  # noqa: F401  imported before forking

import varuna
from tests.exact import models, plain
from tests.exact.forker import Request
from varuna.run import inplace

torch.set_num_threads(1)
inplace.LEAST_BYTES = 0  # these models are small: every weight that can be is added up in place
_ = varuna.Varuna  # imported when first named: here, before forking


def work(request: Request, rank: int) -> None:
    """Everything one worker does, from its environment to its files."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(request.num_workers),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(request.num_workers),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request.master_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID=f"exact-{request.master_port}",
    )
    case = models.case(request.case)
    model = case.model(plain=False)
    optimizer = plain.make_optimizer(model)
    job = varuna.Varuna(
        model,
        optimizer,
        case.dataset(),
        batch_size=request.batch_size,
        lr_scheduler=plain.make_scheduler(optimizer),
        precision=case.precision,
        clip_grad_norm=plain.CLIP_GRAD_NORM,
        seed=request.seed,
        layout=varuna.Layout(
            num_stages=request.num_stages,
            micro_batch_size=request.micro_batch_size,
            schedule=request.schedule,
            recompute=request.recompute,
        ),
        collate_fn=case.collate,
        loss_fn=case.loss_fn,
        progress=False,
        **case.options,
    )
    steps = [dataclasses.asdict(step) for step in job.train(num_steps=request.num_steps)]
    directory = Path(request.directory)
    (directory / f"steps-{rank}.json").write_text(json.dumps(steps))
    state = job.full_state_dict()
    if rank == 0:
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        safetensors.torch.save_file(tensors, directory / "state.safetensors")
