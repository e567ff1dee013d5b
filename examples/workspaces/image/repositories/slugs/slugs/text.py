from __future__ import annotations

import unicodedata


def slug(title: str) -> str:
    """Lower case, with hyphens between the words; accents are taken off."""
    plain = unicodedata.normalize("NFKD", title)
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter)).lower()
    return "".join(letter if letter.isalnum() else "-" for letter in plain)
