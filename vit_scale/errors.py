"""The one exception that means "the user can mend this": shown without a traceback, exit status 2."""


class UserError(Exception):
    """Bad input: an option, a file or a dataset. The message says what is wrong, where, and what to do."""
