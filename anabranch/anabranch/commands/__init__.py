"""The commands of `anabranch`, one module a group."""
