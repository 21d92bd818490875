"""Print the reference page of the configuration: `python -m app.config > docs/configuration.md`."""

from app.config.docs import reference

print(reference(), end="")
