"""Start ranks: functions on this machine, scripts on many. Public names only are used."""
