"""AutoAttack on many images: in chunks, resumable, shared by several processes.

`step` is what an evaluation calls. `runner` prepares a run, `driver` attacks chunk after chunk, `state` keeps results
on disk, `outcome` combines the chunks, `eta` estimates the remaining time, and `reuse` finds the results of an earlier
evaluation.
"""
