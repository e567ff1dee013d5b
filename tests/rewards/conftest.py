from tests.sandbox.conftest import contained, sandbox

__all__ = ["contained", "sandbox"]
