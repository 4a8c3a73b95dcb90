"""Show the default of a dataclass field as its value, not as the lambda that makes it, in the API reference."""

from typing import Any

import griffe


class DataclassDefaults(griffe.Extension):
    """Read `field(default_factory=lambda: X)` as `field(default=X)`."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Replace the lambda in the value of an attribute, before the signature of its class is made."""
        if isinstance(attr.value, griffe.ExprCall):
            for argument in attr.value.arguments:
                if isinstance(argument, griffe.ExprKeyword) and isinstance(argument.value, griffe.ExprLambda):
                    argument.name, argument.value = "default", argument.value.body
