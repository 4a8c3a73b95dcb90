"""The templates of the pages; all text that they are given is escaped."""

import jinja2


def load_template(name: str) -> jinja2.Template:
    """Return a template of this package by the name of its file."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("doubly.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
