"""The wording of every error in the library: the argument, what it must be, what came, the remedy."""


def wrong(argument: str, need: str, got: object, remedy: str = "") -> str:
    """`argument` must NEED, got GOT. REMEDY"""
    return f"`{argument}` must {need}, got {got}." + (f" {remedy}" if remedy else "")
