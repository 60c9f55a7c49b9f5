"""Pipeline schedules: who computes what in which tick, how long it takes, where it idles."""

from megajax.schedule.simulator import simulate as simulate
