"""Saves while training goes on, and goes back to what was saved: joins ``run`` and ``checkpoint``.

```
registry.py     objects of the user's whose state goes along
standing.py     where the job stands besides its sections; to newcomers and into checkpoints
contents.py     what a worker has to save, and how it takes sections from a checkpoint
schedule.py     when to save: pure
verdict.py      whether a save is complete, under way or lost: pure
answers.py      what members have written, told through the store
committing.py   the thread in which a save becomes a checkpoint
saves.py        one worker's part in the saves of its job
resume.py       which checkpoint a job begins from; all workers agree
checkpoints.py  all of it, as a session sees it
```
"""
