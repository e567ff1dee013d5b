"""Long lists, page by page."""

from pages.pages import Pages

__all__ = ["Pages"]
