"""Snapshots: what they are (`manifest.py`), who can run them (`compatibility.py`), where they lie (`repository.py`)."""
