"""How to speak to each system: one folder a connector, the same file set in each."""
