"""Enters the rivals of every method in METHODS, CONTROLLERS and SELECT, so that a run can name them."""
import lab.cmasd.rivals
import lab.ecsv.rivals
import lab.sparse.rivals
import lab.specguard.rivals
import lab.via.rivals                                   # noqa: F401
