"""One kernel and its launcher per file, named after the stage. Importing a kernel binds it to the compiler or the interpreter."""
