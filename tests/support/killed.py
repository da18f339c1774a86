"""`ragkv query --questions` that kills itself after a number of answers and a number of bytes of the next."""

__all__ = ["KILLED"]

KILLED = """
import os, signal, sys
from ragkv.cli import question_files, main

left, part = int(sys.argv.pop(1)), int(sys.argv.pop(1))
write = question_files.AnswerFile._write

def killed(self, text):
    global left
    if not left:
        write(self, text[:part])
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    write(self, text)

question_files.AnswerFile._write = killed
main.main()
"""
"""A program for `CliChild`; the first two words are these numbers."""
