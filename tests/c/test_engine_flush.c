/* SPDX-License-Identifier: Apache-2.0 */
/* FLUSH, forced unit access, and a backup that fails. */
#include "engine_fixture.h"

static uint32_t put_fua(struct world *w, uint64_t page, uint64_t value)
{
	return submit(w, ISW_SIM_WRITE | ISW_SIM_FUA, page, 1, value);
}

/* Jobs that the disk has under way, of one kind. */
static uint32_t under_way(const struct world *w, enum iswi_job_kind kind)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < iswi_sim_of(w->e)->jobs_count; i++)
		n += iswi_sim_of(w->e)->jobs[i].kind == kind;
	return n;
}

/* Its next job is of that kind, and the only one. */
static void disk_does(struct world *w, enum iswi_job_kind kind)
{
	DISK_TAKE(w);
	CHECK_EQ(under_way(w, kind), 1);
	DISK_DONE(w, 0);
}

/* ------------------------------------------------------------------------ flush */

WORLD_TEST(a_flush_waits_for_completed_writes_and_for_the_sync, world_mapped(0))
{
	uint32_t id = put(w, 1, 1, 100), done;

	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], 0); /* complete, and not on the disk */
	done = flush(w);
	CHECK_EQ(w->error[done], PENDING);
	DISK_TAKE(w);
	CHECK_EQ(under_way(w, ISWI_JOB_WRITE), 1);
	DISK_NOTHING(w); /* no sync before the data */
	DISK_DONE(w, 0);
	CHECK_EQ(w->error[done], PENDING);
	DISK_TAKE(w);
	CHECK_EQ(under_way(w, ISWI_JOB_SYNC), 1);
	CHECK_EQ(w->error[done], PENDING);
	DISK_DONE(w, 0);
	CHECK_EQ(w->error[done], 0);
	CHECK_EQ(disk_value(w, 1), 100);
}

WORLD_TEST(a_flush_of_a_clean_device_still_syncs, world_new(0))
{
	uint32_t id;

	write_settled(w, 1, 1, 100);
	id = flush(w);
	CHECK_EQ(w->error[id], PENDING);
	disk_does(w, ISWI_JOB_SYNC);
	CHECK_EQ(w->error[id], 0);
}

/* The version that came while the page was busy decides, not one after the flush. */
WORLD_CASES(a_flush_waits_for_what_was_rewritten_while_busy, 2, once_more, world_mapped(0))
{
	uint32_t first = put(w, 1, 1, 100), second, done;

	DISK_TAKE(w);
	second = put(w, 1, 1, 200); /* while the first is being written */
	remotes_settle(w);
	CAME_TO(w, 0, first, second);
	done = flush(w);
	if (once_more)
		put(w, 1, 1, 300);
	DISK_DONE(w, 0);
	disk_does(w, ISWI_JOB_WRITE);
	CHECK_EQ(w->error[done], PENDING);
	disk_does(w, ISWI_JOB_SYNC);
	CHECK_EQ(w->error[done], 0);
	CHECK_EQ(disk_value(w, 1), once_more ? 300 : 200);
}

WORLD_TEST(a_flush_does_not_wait_for_later_writes, world_mapped(0))
{
	uint32_t done, busy, other;

	put(w, 1, 1, 100);
	DISK_TAKE(w);
	done = flush(w);
	/* A page without end rewritten must not hold a flush for ever. */
	busy = put(w, 1, 1, 200);
	other = put(w, 9, 1, 300);
	DISK_DONE(w, 0);
	disk_does(w, ISWI_JOB_SYNC);
	CHECK_EQ(w->error[done], 0);
	CAME_TO(w, PENDING, busy, other);
}

WORLD_TEST(a_flush_during_a_flush_has_its_own_round, world_mapped(0))
{
	uint32_t first, second, third;

	put(w, 1, 1, 100);
	remotes_settle(w);
	first = flush(w);
	put(w, 2, 1, 200);
	remotes_settle(w);
	second = flush(w);
	DISK_TAKE(w); /* pages 1 and 2 as one write */
	DISK_DONE(w, 0);
	DISK_TAKE(w);
	CHECK_EQ(under_way(w, ISWI_JOB_SYNC), 1);
	put(w, 3, 1, 300);
	remotes_settle(w);
	third = flush(w);
	DISK_DONE(w, 0);
	CHECK_EQ(w->error[first], 0);
	/* The sync under way began before the third flush: it proves nothing for it. */
	CAME_TO(w, PENDING, second, third);
	disk_does(w, ISWI_JOB_WRITE);
	disk_does(w, ISWI_JOB_SYNC);
	CAME_TO(w, 0, second, third);
	CHECK_EQ(disk_value(w, 3), 300);
}

WORLD_TEST(forced_unit_access_is_done_when_synced, world_mapped(0))
{
	uint32_t id = put_fua(w, 1, 100);

	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], PENDING);
	DISK_WRITE(w);
	CHECK_EQ(w->error[id], PENDING);
	DISK_WRITE(w);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(disk_value(w, 1), 100);
}

WORLD_TEST(a_failed_sync_fails_the_flush_and_is_counted, world_new(0))
{
	uint32_t id = flush(w);

	DISK_REFUSE(w);
	CHECK_EQ(w->error[id], -EIO);
	CHECK_EQ(stats_of(w).backup_errors, 1);
	id = flush(w);
	END_WELL(w, id);
}

/* --------------------------------------------------------------- a failing backup */

WORLD_TEST(flushes_fail_while_the_backup_fails_and_do_not_hang, world_mapped(0))
{
	uint32_t waiting, next, fua;

	put(w, 1, 1, 100);
	remotes_settle(w);
	waiting = flush(w);
	next = flush(w);
	fua = put_fua(w, 5, 200);
	REPLY(w, 0, 0);
	DISK_REFUSE(w);
	CAME_TO(w, -EIO, waiting, next);
	CHECK_EQ(w->error[flush(w)], -EIO);
	settle(w);
	CHECK(w->error[fua] != PENDING);
	/* Then it recovers, and so do flushes. */
	waiting = flush(w);
	END_WELL(w, waiting);
	CHECK_EQ(disk_value(w, 1), 100);
}

WORLD_TEST(what_the_backup_refuses_stays_staged, world_mapped(0))
{
	put(w, 1, 1, 100);
	REPLY(w, 0, 0);
	DISK_REFUSE(w); /* half of it landed over what was there */
	CHECK_EQ(disk_value(w, 1), TORN);
	CHECK(!is_backup_current(w, 1));
	CHECK_EQ(stats_of(w).staging_pages_used, 1);
	BREAK(w, 0);
	GOT(w, get(w, 1, 1), 100);
	DISK_NOTHING(w); /* not before its time */
	CHECK_EQ(step(w, ISW_STEP_BACKUP_RETRY, 0, 0), 1);
	DISK_WRITE(w);
	CHECK_EQ(disk_value(w, 1), 100);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(read_settled(w, 1), 100);
}

WORLD_TEST(a_write_with_neither_copy_waits_for_the_backup, world_mapped(0))
{
	uint32_t id = put(w, 1, 1, 100);

	DISK_REFUSE(w);
	REFUSE(w, 0, 0);
	CHECK_EQ(w->error[id], PENDING);
	END_WELL(w, id);
	CHECK_EQ(read_settled(w, 1), 100);
}

WORLD_TEST(the_alarm_is_raised_once_and_taken_back_once, world_new(0))
{
	put(w, 1, 1, 100);
	put(w, 9, 1, 200);
	DISK_TAKE(w);
	DISK_REFUSE(w);
	CHECK_EQ(w->events[ISW_EVENT_BACKUP_FAILING], 1);
	CHECK_EQ(w->last[ISW_EVENT_BACKUP_FAILING].code, -EIO);
	CHECK_EQ(stats_of(w).backup_failing, 1);
	CHECK_EQ(stats_of(w).backup_errors, 1);
	DISK_DONE(w, 0); /* another page succeeds: one still waits */
	CHECK_EQ(w->events[ISW_EVENT_BACKUP_RECOVERED], 0);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_RETRY, 0, 0), 1);
	DISK_REFUSE(w);
	CHECK_EQ(w->events[ISW_EVENT_BACKUP_FAILING], 1);
	CHECK_EQ(stats_of(w).backup_errors, 2);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_RETRY, 0, 0), 1);
	DISK_WRITE(w);
	CHECK_EQ(w->events[ISW_EVENT_BACKUP_RECOVERED], 1);
	CHECK_EQ(w->events[ISW_EVENT_BACKUP_FAILING], 1);
	CHECK_EQ(stats_of(w).backup_failing, 0);
}

WORLD_TEST(it_has_not_recovered_while_a_retry_is_under_way, world_new(0))
{
	put(w, 1, 1, 100); /* this sector is bad; all others are good */
	DISK_REFUSE(w);
	for (int i = 0; i < 3; i++) {
		put(w, 9, 1, 200);
		DISK_TAKE(w);
		CHECK_EQ(step(w, ISW_STEP_BACKUP_RETRY, 0, 0), 1);
		DISK_WRITE(w); /* page 9, while page 1 is neither failed nor written */
		CHECK_EQ(w->events[ISW_EVENT_BACKUP_RECOVERED], 0);
		DISK_FAIL(w, 0);
	}
	CHECK_EQ(w->events[ISW_EVENT_BACKUP_FAILING], 1);
	settle(w);
	CHECK_EQ(w->events[ISW_EVENT_BACKUP_RECOVERED], 1);
}

WORLD_TEST(reads_do_not_ask_whether_the_backup_fails, world_new(0))
{
	uint32_t id;

	write_settled(w, 2, 1, 200);
	put(w, 1, 1, 100);
	DISK_REFUSE(w);
	/* A file opened with O_DSYNC has its reads marked as well. */
	id = submit(w, ISW_SIM_READ | ISW_SIM_FUA, 1, 2, 0);
	DISK_READ(w);
	GOT(w, id, 100);
	CHECK_EQ(w->got[id][1], 200);
}

WORLD_TEST(data_newer_than_what_failed_is_what_gets_written, world_new(0))
{
	uint32_t first = put(w, 1, 1, 100), second, third;

	DISK_TAKE(w);
	second = put(w, 1, 1, 200);
	DISK_FAIL(w, 0);
	third = put(w, 1, 1, 300);
	DISK_NOTHING(w);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_RETRY, 0, 0), 1);
	DISK_WRITE(w);
	CHECK_EQ(disk_value(w, 1), 300);
	CHECK(is_backup_current(w, 1));
	CAME_TO(w, 0, first, second, third);
}

static void fail_all(struct world *w)
{
	while (step(w, ISW_STEP_BACKUP_TAKE, 0, 0))
		DISK_FAIL(w, 0);
}

WORLD_TEST(with_a_hopeless_backup_writes_are_refused, world_new(0))
{
	uint32_t staged = put(w, 0, 8, 100), partly, refused, id;

	put(w, 8, 4, 200);
	partly = put(w, 16, 8, 300); /* four find a buffer */
	refused = put(w, 24, 1, 400);
	CHECK_EQ(w->error[refused], PENDING);
	fail_all(w);
	CHECK_EQ(w->error[refused], -EIO);
	CHECK_EQ(w->error[put(w, 24, 1, 500)], -EIO); /* and so is whoever comes later, at once */
	id = get(w, 0, 8);
	CHECK_EQ(w->error[id], 0); /* reads go on from staging */
	CHECK_EQ(w->got[id][7], 107);
	CHECK_EQ(w->error[staged], PENDING);
	END_WELL(w, staged);
	CHECK_EQ(w->error[partly], -EIO);
	CHECK_EQ(read_settled(w, 24), 0);
	CHECK_EQ(read_settled(w, 0), 100);
	write_settled(w, 24, 1, 600);
}

/* A disk may take seconds to fail: until it had failed for half of staging again, writes waited. */
WORLD_TEST(no_write_waits_for_the_retry_of_a_hopeless_backup, world_new(0))
{
	put(w, 0, 8, 100);
	put(w, 8, 8, 200);
	fail_all(w);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_RETRY, 0, 0), 1);
	CHECK_EQ(w->error[put(w, 24, 1, 400)], -EIO);
	DISK_REFUSE(w);
	CHECK_EQ(w->error[put(w, 24, 1, 500)], -EIO);
	settle(w);
	CHECK_EQ(read_settled(w, 0), 100);
	write_settled(w, 24, 1, 600);
}

WORLD_TEST(a_bad_page_alone_refuses_nobody, world_new(0))
{
	uint32_t stuck = put(w, 31, 1, 100), id;

	DISK_REFUSE(w);
	put(w, 0, 8, 200);
	put(w, 8, 7, 300);
	id = put(w, 16, 1, 400); /* there will be buffers: it waits */
	CHECK_EQ(w->error[id], PENDING);
	disk_settle(w);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(w->error[stuck], PENDING);
	END_WELL(w, stuck);
}
