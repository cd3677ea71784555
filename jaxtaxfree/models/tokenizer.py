"""Text of a checkpoint: its `tokenizer.json`, and the template of its chats."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtaxfree.models.config import read_json
from jaxtaxfree.models.errors import ModelError

INSTALL = "pip install 'jaxtaxfree[models]'"


class Tokenizer:
    """The tokenizer of a folder.

    Raises:
      ModelError: if there is no such folder, it has no `tokenizer.json`, or that cannot be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not self.folder.is_dir():
            of = "that of a checkpoint as Hugging Face publishes it"
            raise ModelError(f"There is no folder {self.folder}: give {of}.")
        if not path.is_file():
            raise ModelError(f"{self.folder} has no tokenizer.json: give tokens by their numbers (--ids 1,2,3).")
        try:
            import tokenizers
        except ImportError:
            raise ModelError(f"text needs the tokenizers library: {INSTALL}, or give --ids.") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise ModelError(f"{path} is no tokenizer ({error}): download it again.") from None
        self._config = read_json(self.folder / "tokenizer_config.json") or {}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text, by default with those that begin one."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._tokenizer.decode([int(token) for token in tokens])

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a chat, up to where the assistant begins, by the checkpoint's own template.

        Args:
          messages: each with a `role` ("system", "user", "assistant") and its `content`.

        Raises:
          ModelError: if there is no template, or it refuses these messages.
        """
        template = self._template()
        try:
            import jinja2
            import jinja2.sandbox
        except ImportError:
            raise ModelError(f"a chat needs the jinja2 library: {INSTALL}.") from None

        def refuse(reason: str) -> None:
            raise jinja2.TemplateError(reason)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        functions: dict[str, Any] = {
            "raise_exception": refuse,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }
        special = {name: _text(self._config[name]) for name in self._config if name.endswith("_token")}
        try:
            text = environment.from_string(template).render(
                messages=list(messages), add_generation_prompt=True, **functions, **special
            )
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template of {self.folder} refuses these messages ({error}).") from None
        return self.encode(text, special=False)

    def _template(self) -> str:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        found: Any = self._config.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {each["name"]: each["template"] for each in found}
            found = named.get("default")
        if not isinstance(found, str):
            raise ModelError(f"{self.folder} has no chat template: it is no chat model; leave --chat out.")
        return found


def _text(token: Any) -> Any:
    """Of a special token, which is its text or an object that has it."""
    return token["content"] if isinstance(token, dict) else token
