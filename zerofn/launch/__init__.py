"""Start ranks: functions on this machine (`zerofn.run`), scripts on one or many machines (`zerofn launch`).

This room uses public names only.

Functions travel by value (`payload.py`): cloudpickle's, with their file and lines, so that an error on a rank shows
the notebook's cell. The first error comes back, with its traceback as a note.

Several machines (`nodes.py`, `node.py`): `zerofn launch` starts a small program on each machine, over ssh, or over
srun in an allocation of SLURM. It talks to the program through its standard input. One line says what to run, so
lists of processes show nothing of the environment, and nothing starts before all machines are ready. When the input
ends, the program ends everything that it started. So nothing outlives the launcher, whether it was interrupted,
killed, or cut off from the network; `tests/system` tries that on machines made of network namespaces.

Ranks belong to torch's elastic agent. Here it ends as its ranks do (`agent.py`), so that a run that saved and asks
for a restart is distinguished from one that failed. Ranks of `zerofn.run` and of a notebook look for the process that
started them five times a second, and end with all they have started once it is gone (`tied_processes.py`).

Start reading: `run.py`, then `nodes.py`.
"""
