"""The demo's conversation: a coding agent's long head (rules and tool schemas), then short turns.

Decides only what is said. The head has about 2,000 tokens of SmolLM2's vocabulary, which is little for an
agent; the turns are as short as an agent's are.
"""

from __future__ import annotations

from gateway.chat.messages import JsonObject, Message, Tool

_RULES = """You are a careful coding agent in a terminal. You work on the user's repository by calling tools.
Work in small steps. Before you change a file, read it. After you change a file, run the tests that cover it.
Never guess the content of a file, the output of a command or the name of a function: look. Quote file names exactly.
When a command fails, read its output from the top, name the first error, and mend that one before anything else.
Keep the user's style: the same indentation, the same naming, the same way to handle errors. Do not reformat code that
you do not change. Do not add dependencies without asking. Do not touch generated files, lock files or vendored code.
Prefer deleting code to adding code. Prefer a clear name to a comment. A comment says why, never what.
If the task is ambiguous, state the reading that you chose in one sentence and go on. If it is dangerous (deleting data,
force-pushing, running as root, sending anything to a network), stop and ask first.
Answer briefly. Plain text, no headings. When you are done, say what changed and how you checked it, in brief."""

_CONVENTIONS = """Conventions of this repository:
- src/ holds the library, tests/ its tests, tools/ scripts for developers, docs/ the manual.
- Python 3.11, type hints everywhere, pytest, one test file for each module, names of tests are sentences.
- Errors are raised close to their cause and translated once, at the edge. Nothing is swallowed.
- Numbers have a unit in their name: timeout_s, size_bytes, n_rows. Times come from a monotonic clock.
- Commits have an imperative subject of at most 60 characters and a body that says why.
- The changelog is written in the user's words, and breaking changes stand first.
- Public functions have a docstring of one sentence; private ones have a good name.
- Files stay under 400 lines and functions under 40. A longer one is two ideas: find the second one's name."""


def _tool(name: str, description: str, required: tuple[str, ...], **parameters: str) -> Tool:
    properties: JsonObject = {
        key: {"type": "string", "description": text} for key, text in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(name, description, schema)


TOOLS: tuple[Tool, ...] = (
    _tool(
        "read_file",
        "Reads a text file of the repository and returns its lines with their numbers.",
        ("path",),
        path="Path of the file, relative to the repository's root.",
        first_line="Number of the first line to return, counted from 1.",
        last_line="Number of the last line to return; the end of the file when left out.",
    ),
    _tool(
        "write_file",
        "Writes a whole file, creating the folders that are missing. Overwrites what was there.",
        ("path", "content"),
        path="Path of the file, relative to the repository's root.",
        content="The new content, whole.",
    ),
    _tool(
        "replace_in_file",
        "Replaces one passage of a file. The passage must occur exactly once.",
        ("path", "old", "new"),
        path="Path of the file, relative to the repository's root.",
        old="The passage as it stands, with its white space.",
        new="What takes its place.",
    ),
    _tool(
        "list_folder",
        "Lists a folder's files and folders with their sizes in bytes.",
        ("path",),
        path="Path of the folder, relative to the repository's root.",
        depth="How many levels of folders to go down; 1 when left out.",
    ),
    _tool(
        "search_text",
        "Searches the repository for a regular expression and returns path and line of each match.",
        ("pattern",),
        pattern="The regular expression, in Python's syntax.",
        folder="Where to search; the whole repository when left out.",
        glob="Which files to search, for example *.py.",
        limit="How many matches to return at most.",
    ),
    _tool(
        "run_command",
        "Runs a shell command in the repository's root and returns its exit status and output.",
        ("command",),
        command="The command line.",
        timeout_s="Seconds after which it is ended; 120 when left out.",
    ),
    _tool(
        "run_tests",
        "Runs tests and returns the names and messages of those that failed.",
        (),
        selection="A file, a folder or an expression that selects tests; all tests when left out.",
        stop_early="'yes' to stop at the first failure.",
    ),
    _tool(
        "git_diff",
        "Shows what has changed in the working tree since the last commit.",
        (),
        path="Only the changes of this file or folder.",
        staged="'yes' to show what is staged instead.",
    ),
    _tool(
        "git_commit",
        "Commits the staged changes.",
        ("subject", "body"),
        subject="One imperative line of at most 60 characters.",
        body="Why the change was made, wrapped at 100 columns.",
    ),
    _tool(
        "ask_user",
        "Asks the user one question and waits for the answer. Use it only when you cannot go on without.",
        ("question",),
        question="The question, with the choices that you see.",
    ),
)

SYSTEM = Message("system", f"{_RULES}\n\n{_CONVENTIONS}")

TURNS: tuple[Message, ...] = (
    Message("user", "The test test_parse_date fails since yesterday. What do you look at first?"),
    Message(
        "user",
        "Output of run_tests: 1 failed, 41 passed. FAILED tests/test_dates.py::test_parse_date - "
        "ValueError: time data '2024-02-30' does not match format '%Y-%m-%d'. Explain the cause.",
    ),
    Message("user", "Good. Now name the one file that you would change, and why."),
)
