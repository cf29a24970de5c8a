"""Lines of a test by the comments that stand on them."""

from __future__ import annotations

import inspect
import os


def line(text: str) -> str:
    """ "FILE:LINE in FUNCTION" of the caller's only line that ends in the comment `text`.

    As reports have it, for a function within the caller too.
    """
    caller = inspect.currentframe().f_back
    lines, first = inspect.getsourcelines(caller)
    numbers = [first + i for i, each in enumerate(lines) if each.rstrip().endswith(f"# {text}")]
    assert len(numbers) == 1
    functions = [caller.f_code]
    for code in functions:  # grows
        functions += [each for each in code.co_consts if inspect.iscode(each)]
    within = [
        code
        for code in functions
        if numbers[0] in {number for _, _, number in code.co_lines() if number}
    ]
    name = max(within, key=lambda code: code.co_firstlineno).co_name
    return f"{os.path.basename(caller.f_code.co_filename)}:{numbers[0]} in {name}"
