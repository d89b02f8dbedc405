"""State per section, in files that any plan can read: safetensors parts and one JSON manifest, written last.

```
values.py       what a checkpoint is made of: orders, parts, job state, manifest (no torch)
errors.py       CheckpointError, StateError (no torch)
names.py        tensor names: parameters/<name>, optimizer/<name>/<key>, buffers/<name> (no torch)
manifest.py     assemble, encode, decode: pure (no torch)
shares.py       which holder writes which tensor; who takes over after a death: pure (no torch)
retention.py    which checkpoints go, which leftovers go: pure (no torch)
layout.py       bytes of a safetensors file (no torch)
store.py, store_file.py, store_fsspec.py      directories and buckets (no torch)
commit.py       begin, commit, abandon a save; prune (no torch)
find.py         the newest complete checkpoint, or an explicit step (no torch)
verify.py, export.py                          read everything; write for other programs (no torch)
tree.py         nested state as JSON and tensors, refused where it would need pickle
collect.py      parameters, buffers and optimizer state of a section
options.py      options of param groups by parameter name
snapshot.py, save.py                          copy in line, write behind
load.py, restore.py, pretrained.py            tensors by name, from a checkpoint or a Hugging Face directory
```

Import from the modules: those marked so do not import torch, and the manager uses only them.
"""
