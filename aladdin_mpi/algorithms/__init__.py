"""The algorithms, one module each; importing this package registers all of them."""

from importlib import import_module
from pkgutil import iter_modules


def _register_all() -> None:
    for module in iter_modules(__path__, f"{__name__}."):
        import_module(module.name)


_register_all()
