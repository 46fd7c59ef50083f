"""What others wrote, read here: DeepSpeed's configuration. Public names only are used."""
