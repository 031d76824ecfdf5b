"""Checks the language and the size of code and pages against ceilings that only go down.

    python infra/language.py                     exit 1 where a count exceeds its ceiling in infra/language.toml
    python infra/language.py --list RULE [FOLDER]    each finding of one rule, as path:line
    python infra/language.py --lower             write today's lower counts as the new ceilings

Rules, counted for each folder:

    names        vague words bound as variables or parameters
    participles  functions named by a bare participle
    verbs        functions whose first word is no verb; properties, conversions and predicates are exempt
    tests        names of tests with a word of the list
    docstrings   first sentences of more than 20 words, or that begin with a pronoun instead of an imperative or a noun
    phrases      phrases of the list in docstrings, comments, strings and pages
    paragraphs   paragraphs of more than 150 words on a page
    aliases      variables and parameters that name a class by another word than its own
    fragments    private functions of at most three lines that are called once, in place, in their own module
    lines        lines of modules, without comments

The last two are of the product alone. A feature may need more lines: then its commit raises that ceiling, by hand.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = "infra/language.toml"
FOLDERS = ("pipelines", "resources", "assets", "cli", "src", "bench", "tests", "infra")
PRODUCT = FOLDERS[:5]
PAGES = "docs"
SENTENCE_WORDS = 20
FRAGMENT_LINES = 3
PARAGRAPH_WORDS = 150

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    folder: str
    path: str
    line: int
    text: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Words:
    """The lists of infra/language.toml."""

    vague: frozenset[str]
    verbs: frozenset[str]
    prefixes: frozenset[str]
    pronouns: frozenset[str]
    aliases: frozenset[str]
    participle: re.Pattern[str]
    tests: re.Pattern[str]
    phrases: re.Pattern[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="+", metavar=("RULE", "FOLDER"), help="print each finding of a rule")
    parser.add_argument("--lower", action="store_true", help="write today's lower counts as ceilings")
    options = parser.parse_args()
    words, ceilings = load_settings(ROOT)
    findings = list(check(ROOT, words))
    if options.list:
        rule, *folders = options.list
        print_findings(f for f in findings if f.rule == rule and f.folder in (folders or (*FOLDERS, PAGES)))
        return 0
    counts = Counter[tuple[str, str]]()
    for f in findings:
        counts[f.folder, f.rule] += f.count
    if options.lower:
        lower_ceilings(ROOT / SETTINGS, ceilings, counts)
        return 0
    return report(ceilings, counts)


def report(ceilings: Mapping[tuple[str, str], int], counts: Counter[tuple[str, str]]) -> int:
    """Print each count that exceeds its ceiling. Returns the exit code."""
    exceeded = {key: count for key, count in sorted(counts.items()) if count > ceilings.get(key, 0)}
    for (folder, rule), count in exceeded.items():
        ceiling = ceilings.get((folder, rule), 0)
        print(f"{folder}: {count} {rule}, ceiling {ceiling}: python infra/language.py --list {rule} {folder}")
    lower = sum(ceiling - counts[key] for key, ceiling in ceilings.items() if counts[key] < ceiling)
    if lower and not exceeded:
        print(f"language: {lower} findings fewer than the ceilings: python infra/language.py --lower")
    return 1 if exceeded else 0


def print_findings(findings: Iterator[Finding]) -> None:
    for f in findings:
        print(f"{f.path}:{f.line}: {f.text}")


def load_settings(root: Path) -> tuple[Words, dict[tuple[str, str], int]]:
    """Returns the lists of words, and the ceiling of each folder and rule."""
    raw = tomllib.loads((root / SETTINGS).read_text())
    lists = {
        name: frozenset(raw["words"][name].split()) for name in ("vague", "verbs", "prefixes", "pronouns", "aliases")
    }
    participle, phrases = re.compile(raw["words"]["participle"]), re.compile("|".join(raw["words"]["phrases"]))
    tests = re.compile(f"_(?:{'|'.join(raw['words']['tests'].split())})(?=_|$)")
    ceilings = {(folder, rule): n for folder, rules in raw["ceilings"].items() for rule, n in rules.items()}
    return Words(**lists, participle=participle, tests=tests, phrases=phrases), ceilings


def lower_ceilings(settings: Path, ceilings: Mapping[tuple[str, str], int], counts: Counter[tuple[str, str]]) -> None:
    """Rewrite each ceiling that is above today's count. Ceilings never rise."""
    head = settings.read_text().partition("[ceilings.")[0].rstrip()
    lines = [head]
    for folder in dict.fromkeys(folder for folder, _ in ceilings):
        lines.append(f"\n[ceilings.{folder}]")
        rules = {rule: n for (f, rule), n in ceilings.items() if f == folder}
        lines += [f"{rule} = {min(n, counts[(folder, rule)])}" for rule, n in rules.items()]
    settings.write_text("\n".join(lines) + "\n")


def check(root: Path, words: Words) -> Iterator[Finding]:
    """Yields every finding in the code and on the pages."""
    for folder in FOLDERS:
        for path in _list_modules(root / folder):
            yield from check_module(path.read_text(), folder, str(path.relative_to(root)), words)
    for path in (*sorted(root.glob("*.md")), *sorted((root / PAGES).rglob("*.md"))):
        yield from check_page(path.read_text(), str(path.relative_to(root)), words)


def _list_modules(folder: Path) -> Iterator[Path]:
    """Yields the modules below a folder, without those behind links."""
    for path in sorted(folder.rglob("*.py")):
        inner = [folder / part for part in path.relative_to(folder).parents if str(part) != "."]
        if not any(p.is_symlink() for p in (path, *inner)):
            yield path


def check_module(source: str, folder: str, path: str, words: Words) -> Iterator[Finding]:
    def make_finding(rule: str, line: int, text: str) -> Finding:
        return Finding(rule, folder, path, line, text)

    tree = ast.parse(source)
    for node in ast.walk(tree):
        yield from _check_node(node, words, make_finding)
    if folder in PRODUCT:
        for function in list_fragments(tree):
            yield make_finding("fragments", function.lineno, function.name)
        lines = sum(not line.lstrip().startswith("#") for line in source.splitlines())
        yield Finding("lines", folder, path, 1, f"{lines} lines", lines)
    # Statements cannot match: a phrase is words with blanks between them.
    for match in words.phrases.finditer(source):
        yield make_finding("phrases", source.count("\n", 0, match.start()) + 1, match[0])


def list_fragments(tree: ast.Module) -> Iterator[Function]:
    """Yields the private functions whose few lines would read as well where they are called."""
    nodes = list(ast.walk(tree))
    uses = Counter(
        n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, ast.Name | ast.Attribute)
    )
    calls = Counter(getattr(n.func, "id", getattr(n.func, "attr", "")) for n in nodes if isinstance(n, ast.Call))
    for function in (n for n in nodes if isinstance(n, Function) and not n.decorator_list):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        once = uses[function.name] == calls[function.name] == 1 and re.match("_[^_]", function.name)
        if once and body and (function.end_lineno or 0) - body[0].lineno < FRAGMENT_LINES:
            yield function


def _check_node(node: ast.AST, words: Words, make_finding: Callable[[str, int, str], Finding]) -> Iterator[Finding]:
    if (name := _get_bound_name(node)) in words.vague:
        yield make_finding("names", node.lineno, name)  # type: ignore[attr-defined]
    if name in words.aliases:
        yield make_finding("aliases", node.lineno, name)  # type: ignore[attr-defined]
    if isinstance(node, Function) and not _is_exempt(node, words):
        bare = node.name.strip("_")
        if "_" not in bare and words.participle.fullmatch(bare):
            yield make_finding("participles", node.lineno, node.name)
        if bare.split("_")[0] not in words.verbs | words.prefixes:
            yield make_finding("verbs", node.lineno, node.name)
    if isinstance(node, Function) and node.name.startswith("test_") and (match := words.tests.search(node.name)):
        yield make_finding("tests", node.lineno, f"{node.name}: {match[0].strip('_')}")
    if isinstance(node, Function | ast.ClassDef) and (text := ast.get_docstring(node)):
        sentence = re.split(r"(?<=[.:?!])\s|\n\s*\n", text, maxsplit=1)[0]
        if len(sentence.split()) > SENTENCE_WORDS or sentence.split()[0].strip(",").lower() in words.pronouns:
            yield make_finding("docstrings", node.body[0].lineno, " ".join(sentence.split()))


def _get_bound_name(node: ast.AST) -> str:
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def _is_exempt(function: Function, words: Words) -> bool:
    """Returns true for names that a framework chooses, or that name a value: dunders, tests, fixtures, properties."""
    decorators = " ".join(ast.unparse(d) for d in function.decorator_list)
    return function.name.startswith(("__", "test_", "pytest_")) or bool(re.search(r"property|fixture", decorators))


def check_page(text: str, path: str, words: Words) -> Iterator[Finding]:
    # Code keeps its lines, so that numbers stay right.
    prose = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
    for match in words.phrases.finditer(prose):
        yield Finding("phrases", PAGES, path, prose.count("\n", 0, match.start()) + 1, match[0])
    line = 1
    for block in re.split(r"(\n\s*\n|\n(?=\s*[-*|#\d]))", prose):
        if len(block.split()) > PARAGRAPH_WORDS:
            yield Finding("paragraphs", PAGES, path, line, f"{len(block.split())} words")
        line += block.count("\n")


if __name__ == "__main__":
    sys.exit(main())
