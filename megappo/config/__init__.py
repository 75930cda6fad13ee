"""The configuration: schema, reading from YAML and the command line, cross-field checks."""

from megappo.config.checks import check
from megappo.config.errors import ConfigError
from megappo.config.load import dump, load
from megappo.config.schema import Config

__all__ = ["Config", "ConfigError", "check", "dump", "load"]
