from tests.sandbox.conftest import sandbox

__all__ = ["sandbox"]
