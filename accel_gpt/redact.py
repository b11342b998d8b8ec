"""Secrets out of text."""

import re

SECRET = re.compile(
    # tokens by their makers' prefix
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:ghp|gho|github_pat|glpat|sk|xox[a-z])[_-][\w-]{16,}"
    r"|\bAKIA[A-Z0-9]{12,}|\beyJ[\w-]{8,}\.[\w.-]+"  # AWS key ids, JSON web tokens
)
PERSON = re.compile(r"([A-Za-z][\w+.-]*://)[^\s/?#\"']*@")  # name and password in a URL
QUERY = re.compile(r"([A-Za-z][\w+.-]*://[^\s?\"']*\?)[^\s\"']+")  # signed URLs carry keys there


def without_secrets(text: str) -> str:
    """`text` with access tokens, and names, passwords and queries in its URLs, starred."""
    return QUERY.sub(r"\1***", PERSON.sub(r"\1***@", SECRET.sub("***", text)))
