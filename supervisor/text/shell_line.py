"""Read lines that are being typed in a shell, and complete them in bash.

Bash splits a word at a colon and an equals sign, and inserts what it is given as it is. So its
script hands over the line itself, and `Bash` quotes and cuts what is offered.
"""

import os
import re
from typing import Any

from click.shell_completion import BashComplete, CompletionItem


def read_line(line: str) -> tuple[list[str], str, str]:
    """Return the words of a line, the one that is being typed, and the quote that it is in."""
    words: list[str] = []
    word, quote, begun, escaped = "", "", False, False
    for char in line:
        if escaped:
            word, escaped = word + char, False
        elif char == "\\" and quote != "'":
            begun = escaped = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                word += char
        elif char in "'\"":
            begun, quote = True, char
        elif char.isspace():
            if begun:
                words.append(word)
            word, begun = "", False
        else:
            word, begun = word + char, True
    return words, word, quote


_SPECIAL = re.compile(r"([^\w%+,./:=@-])")


def escape(text: str) -> str:
    """Return a text as a word of a shell's line."""
    return _SPECIAL.sub(r"\\\1", text)


_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' completion type value
    COMPREPLY=()
    for completion in $(env COMP_LINE="${COMP_LINE:0:COMP_POINT}" \\
        COMP_WORDBREAKS="$COMP_WORDBREAKS" %(complete_var)s=bash_complete $1); do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == 'dir' ]]; then
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            COMPREPLY+=("$value")
        fi
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    """Completion of bash, which gets the line as it is typed; older scripts give its words."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        if "COMP_LINE" not in os.environ:
            return super().get_completion_args()
        words, begun, _ = read_line(os.environ["COMP_LINE"])
        return words[1:], begun

    def format_completion(self, item: "CompletionItem[Any]") -> str:
        if item.type != "plain" or "COMP_LINE" not in os.environ:
            return super().format_completion(item)
        _, begun, quote = read_line(os.environ["COMP_LINE"])
        if quote:
            return f"plain,{item.value}"
        breaks = set(os.environ.get("COMP_WORDBREAKS", "")) & set(":=@")
        typed = escape(begun)
        kept = max((typed.rfind(each) + 1 for each in breaks), default=0)
        return f"plain,{escape(str(item.value))[kept:]}"
