"""notebook.py NOTEBOOK: runs the code cells of a notebook in order, as `vramcast rehearse -- notebook.ipynb` asks.

With IPython installed, magics and shell lines work as in a notebook; without it, a cell that has one is refused by name.
"""
import builtins, json, os, sys


def cells(path):
    with open(path, encoding="utf-8") as file:
        notebook = json.load(file)
    for number, cell in enumerate(notebook.get("cells", []), 1):
        if cell.get("cell_type") == "code":
            source = cell.get("source", "")
            yield number, source if isinstance(source, str) else "".join(source)


def translate(number, source, shell):
    """Python from what notebooks allow beyond it."""
    if shell:
        return shell.transform_cell(source)
    for line in source.splitlines():
        if line.lstrip().startswith(("%", "!")):
            sys.exit(f"cell {number}: {line.strip()!r} needs IPython, which this environment does not have")
    return source


def main(path):
    try:
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance()
    except ImportError:
        shell = None
    if shell:
        builtins.get_ipython = lambda: shell
    space = shell.user_ns if shell else {}
    space.update({"__name__": "__main__"})
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.argv = [path]
    for number, source in cells(path):
        exec(compile(translate(number, source, shell), f"{os.path.basename(path)}[{number}]", "exec"), space)


main(sys.argv[1])
