from slugs import slug


def test_words():
    assert slug("Hello World") == "hello-world"


def test_accents():
    assert slug("Crème brûlée") == "creme-brulee"
