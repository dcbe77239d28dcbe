"""The sandbox state machine, its journal, timers, admission, and reconciliation after a crash."""
