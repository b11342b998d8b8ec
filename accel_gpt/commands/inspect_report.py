"""What was found in data and tokenizers, for people; no byte of it rules their terminal."""

from typing import Any


def data_text(report: dict[str, Any]) -> str:
    """The report of `inspect_data` for people."""
    tokenizer, splits = report["tokenizer"], report["splits"]
    made = report["prepared"] or {}
    how = ", ".join(f"{key} {value}" for key, value in made.items() if value not in (None, ""))
    lines = [
        f"{report['place']}",
        f"tokenizer    {tokenizer['kind']}, {report['vocab_size']:,} tokens, end-of-text "
        f"{number(report['eot_id'])}, fingerprint {tokenizer['fingerprint'][:12]}",
        f"stored as    {report['dtype']}",
        f"prepared     {how or 'unknown'}",
        f"{'split':<12} {'shards':>7} {'tokens':>15} {'documents':>12} {'bytes':>15} bytes/token"
        "  fingerprint",
    ]
    for name, split in splits.items():
        lines.append(
            f"{name:<12} {split['shards']:>7,} {split['tokens']:>15,} "
            f"{number(split['documents']):>12} {number(split['bytes']):>15} "
            f"{number(split['bytes_per_token']):>11}  {split['fingerprint'][:12]}"
        )
    for name, split in splits.items():
        for i, window in enumerate(split["windows"], 1):
            lines.append(f"{name} {i:<{12 - len(name)}}{escape(window)}")
    for name, split in splits.items():
        if split["read"]:
            lines += read_lines(name, split["read"])
    return "".join(f"{printable(line)}\n" for line in lines)


def read_lines(name: str, read: dict[str, Any]) -> list[str]:
    """What reading a split found, for people."""
    frequent, run, hashes = read["most_frequent"], read["longest_run"], read["sha256"]
    speed = read["file_bytes"] / 1e6 / max(read["seconds"], 1e-9)
    lines = [
        f"{name} read: {read['tokens']:,} tokens, {read['file_bytes'] / 1e6:.1f} MB at "
        f"{speed:,.0f} MB/s; SHA-256 of shards: "
        + ", ".join(f"{count} {what}" for what, count in hashes.items() if count)
    ]
    if read["tokens"]:
        lines += [
            f"  counted        {number(read['documents'])} end-of-text, {number(read['bytes'])} "
            f"bytes, {number(read['bytes_per_token'])} bytes per token, largest id "
            f"{read['largest_id']}",
            f"  most frequent  {quoted(frequent)}, {100 * frequent['share']:.2f} % of the tokens",
            f"  longest run    {quoted(run)}, {run['length']:,} times from token "
            f"{run['position']:,} of {run['shard']}",
        ]
    return lines


def quoted(token: dict[str, Any]) -> str:
    """Id and text of a token."""
    return f"{token['id']}" + ("" if token["text"] is None else f" '{escape(token['text'])}'")


def number(value: float | None) -> str:
    """A number, or that it is not known."""
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def escape(text: str) -> str:
    """`text` on one line, of which a terminal obeys nothing: as Python writes it."""
    return printable(text.replace("\\", "\\\\"))


def printable(text: str) -> str:
    """`text` with control and formatting characters written as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def tokenizers_text(report: dict[str, Any]) -> str:
    """The table of `compare.compare` for people."""
    lines = [
        f"{report['text']}: {report['bytes']:,} bytes",
        f"{'tokenizer':<24} {'vocabulary':>10} {'tokens':>13} {'tokens/byte':>11} "
        f"{'bytes/token':>11} {'1-byte share':>12} {'MB/s':>8}  round trip",
    ]
    for row in report["tokenizers"]:
        lines.append(
            f"{row['tokenizer']:<24} {row['vocab_size']:>10,} {row['tokens']:>13,} "
            f"{row['tokens_per_byte']:>11.4f} {row['bytes_per_token']:>11.3f} "
            f"{row['single_byte_share']:>12.2%} {row['mb_per_s']:>8.1f}  "
            f"{'yes' if row['round_trip'] else 'no'}"
        )
    return "".join(f"{printable(line)}\n" for line in lines)
