"""Enters the baselines of every method in METHODS, so that a run can name them."""
import lab.cmasd.baselines
import lab.ecsv.baselines
import lab.sparse.baselines
import lab.specguard.baselines
import lab.via.baselines                                # noqa: F401
