"""Read files of other libraries: DeepSpeed's configurations and checkpoints, torch's checkpoints, config.json files.

`from_deepspeed` (`deepspeed.py`) turns a configuration into arguments of ZeroFn. `load_deepspeed` reads DeepSpeed's
checkpoints, and `load_dcp` and `export_dcp` those of FSDP2 and torchtitan. `hf_config.py` makes a step to plan from a
Hugging Face config.json.

Keys of DeepSpeed are data (`deepspeed_keys.json`). A row says what becomes of a key: mapped, decided without a knob,
without meaning, or refused. A key in no row is an error with the nearest name. So is a value that is
not of its row's kind, even if the key has no effect.

Invariants:

- This room uses public names only, as a user's code does; a test allows no other import, except for the check of
  arguments. The same holds for `integrations`, `launch` and `notebook`.
- Pickles of others are data. Checkpoints of DeepSpeed and of torch are pickles, which may call anything. Their
  classes are replaced by empty ones or are in a short list; any other name is refused before anything is made
  (`torch_files.py`).

Start reading: `deepspeed.py`, then `torch_files.py`.
"""
