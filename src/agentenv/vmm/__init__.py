"""Virtual machine monitors behind one contract, and the probe that finds out which of them work here."""
