"""`anabranch demo`: the whole pipeline on an embedded stack, with a bank that must never lose a cent."""

from anabranch.demo.run import DemoResult, run_demo

__all__ = ["DemoResult", "run_demo"]
