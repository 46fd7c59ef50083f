"""One AdamW update beside torch's and DeepSpeed's."""
