"""One kernel and its launcher per file, named after the stage; importing one binds it to compiler or interpreter."""
