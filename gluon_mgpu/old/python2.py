"""Recognizes programs for Python 2, by what 2to3 makes of their code, or by an error.

2to3 is a part of the Pythons in `packages.PINS`.
"""

from __future__ import annotations

import re
import tokenize
import warnings
from pathlib import Path

CONVERT = "this is written for Python 2: convert it with 2to3 (`gluon-mgpu run -m lib2to3 -w FILE.py`)"
MODULES = (  # that 2to3 renames
    "__builtin__|anydbm|BaseHTTPServer|CGIHTTPServer|commands|ConfigParser|Cookie|cookielib|copy_reg|cPickle|cStringIO|"
    "exceptions|htmlentitydefs|HTMLParser|httplib|Queue|repr|ScrolledText|SimpleHTTPServer|SocketServer|StringIO|"
    "thread|Tix|tkFileDialog|tkFont|Tkinter|tkMessageBox|tkSimpleDialog|ttk|urllib2|urlparse|UserDict|UserList|"
    "UserString|xmlrpclib"
)
LONGEST = 100_000  # characters, which take several seconds
LISTS = r"(dict_\w+|filter|map|range|zip)"  # what Python 2's functions returned as lists
# Errors of what 2to3 converts. Python 3.13 and later have no 2to3, but name the first two.
ERRORS = (
    r"Missing parentheses in call to '(print|exec)'|multiple exception types must be parenthesized",
    r"unsupported operand type\(s\) for >>: 'builtin_function_or_method'",  # print >> file, text
    "name '(apply|basestring|execfile|intern|long|raw_input|reduce|reload|StandardError|unichr|unicode|xrange)' is not",
    f"No module named '({MODULES})'",
    "module 'urllib' has no attribute '(quote|unquote|urlencode|urlopen|urlretrieve)",
    r"module 'itertools' has no attribute '(ifilter|imap|izip)",
    r"module '(os|sys|types)' has no attribute '(getcwdu|maxint|\w+Type)'",
    r"cannot import name '(ifilter|imap|izip|quote|unquote|urlencode|urlopen|urlretrieve)\w*' from '(itert|urllib')",
    r"'[\w.]*[dD]ict' object has no attribute '(has_key|iteritems|iterkeys|itervalues)'",
    r"'[\w.]+' object has no attribute 'next'",
    rf"'{LISTS}' object (is not subscriptable|does not support|has no attribute '(append|extend|index|remove|sort)')",
    rf"object of type '{LISTS}' has no len|unsupported operand type\(s\) for \+: ('{LISTS}' and|'list' and '{LISTS})",
)
BY_HAND = (  # (pattern of an error, what to change, because 2to3 leaves it)
    ("inconsistent use of tabs", "`expand -i FILE.py` prints it with spaces instead of tabs"),
    (
        "'float' object cannot be interpreted as an integer|slice indices must be integers",
        "write // to divide integers",
    ),
    ("(list|tuple) indices must be integers or slices, not float|only integers, slices", "write // to divide integers"),
    ("(module 'string' has no attribute|cannot import name) '(letters|lowercase|uppercase)'", "use string.ascii_..."),
    ("name 'cmp' is not defined|'cmp' is an invalid keyword", "sort with key=, or with functools.cmp_to_key"),
    ("'ascii' codec can't decode byte", "load its pickle files with pickle.load(file, encoding='latin1')"),
    (
        r"write\(\) argument must be str, not bytes|'utf-8' codec can't decode byte 0x80",
        "open pickle files as 'rb', 'wb'",
    ),
    ("'str' object has no attribute 'decode'", "omit decode, because strings are Unicode"),
    ("module 'sys' has no attribute 'setdefaultencoding'", "omit sys.setdefaultencoding"),
)


def is_convertible(code: str) -> bool:
    """Whether this code, which is not valid in Python 3, is valid after 2to3 has converted it. For more code than
    LONGEST, this would take long, and the answer is False."""
    if len(code) > LONGEST:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # lib2to3 is deprecated; the code may have invalid escapes
            from lib2to3 import refactor

            tool = refactor.RefactoringTool(refactor.get_fixers_from_package("lib2to3.fixes"))
            compile(str(tool.refactor_string(f"{code}\n", "")), "", "exec", dont_inherit=True)
        return True
    except Exception:  # lib2to3 raises many exception types for what it cannot parse
        return False


def code_of(error: SyntaxError) -> str:
    """The code that contains a syntax error: of the file, or if there is none, the line."""
    try:
        with tokenize.open(error.filename or "") as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return (error.text or "").strip()


def cell_without_commands(cell: str) -> str:
    """The Python code of a notebook's cell: without IPython's commands, such as %matplotlib inline."""
    return re.sub(r"^([ \t]*)([%!?].*|.*\?)$", r"\1pass", cell, flags=re.MULTILINE)


def is_beside_importer(error: ImportError) -> bool:
    """Whether a module that was not found is in the folder of the package that imports it, where Python 2 looked."""
    traceback = error.__traceback__
    while traceback and traceback.tb_next:
        traceback = traceback.tb_next
    if not traceback or not error.name or not traceback.tb_frame.f_globals.get("__package__"):
        return False
    beside = Path(traceback.tb_frame.f_code.co_filename).with_name(error.name.partition(".")[0])
    return beside.with_suffix(".py").is_file() or (beside / "__init__.py").is_file()
