"""The packages of a wheel; all else is in pyproject.toml, which cannot place a folder in another.

`configs/` stays at the top of the repository and is `accel_gpt/configs/` once installed.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["accel_gpt*"]), "accel_gpt.configs"],
    package_dir={"accel_gpt.configs": "configs"},
)
