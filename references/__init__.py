"""The oracles: exact references in plain torch, and the named wrong answers that they can be asked for."""
