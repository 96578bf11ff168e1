"""Every private part of Optuna that this project uses: names, tables, and overridden methods.

`tables` has what is read and written by SQL, without importing Optuna; `samplers` has the
samplers, and `tpe` one of them. Each part has a line that says why.
`tests/contract/test_optuna_compat.py` and `test_optuna_tpe.py` assert each signature and meaning,
so that a release which changes one fails there; a unit test keeps such parts out of other
packages. What must not live here: public parts of Optuna, and what is done with these.
"""
