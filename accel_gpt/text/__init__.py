"""Documents from files, URLs and the Hub."""
