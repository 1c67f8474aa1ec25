"""One file per verb: parse options, call, hand the result to a reporter."""
