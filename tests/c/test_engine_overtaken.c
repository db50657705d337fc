/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies that are overtaken: whatever else happens to a page wins over its copy, from the backup (a
 * fill) or from the slab's source (a pull), in both of its stages.
 */
#include <unistd.h>

#include "migrate_fixture.h"

/* A case's number has the kind of copy in its lowest bit, and the stage it is in above. */
#define KINDS_READING 2u
#define KINDS_STAGES  (2u * STAGES)

static bool is_pull(uint32_t n)
{
	return n % 2;
}

static enum stage stage_of(uint32_t n)
{
	return n / 2 % STAGES;
}

/* So many pages of slab 0, page i holding 10 + i, are being copied to TARGET in one run. */
static struct world *world_copying(uint32_t n, uint32_t pages)
{
	struct world *w;

	if (is_pull(n))
		return world_pulling(0, stage_of(n), pages);
	w = world_of_two();
	write_settled(w, 0, pages, 10);
	map(w, 0, TARGET);
	fill(w, 0, pages, (int)pages);
	DISK_TAKE_READ(w);
	if (stage_of(n) == READING)
		return w;
	DISK_DONE(w, 0);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	return w;
}

/* Of a copy that is being read. */
static void is_read(struct world *w, uint32_t n)
{
	if (is_pull(n))
		REPLY(w, SOURCE, 0);
	else
		DISK_DONE(w, 0);
}

static void goes_on(struct world *w, uint32_t n)
{
	if (stage_of(n) == READING)
		is_read(w, n);
	else
		REPLY(w, TARGET, 0); /* the first sent */
}

static void copies_are(const struct world *w, uint32_t n, uint64_t arrived, uint64_t dropped)
{
	CHECK_EQ(stats_of(w).pages_migrated, is_pull(n) ? arrived : 0);
	CHECK_EQ(stats_of(w).pages_copied, is_pull(n) ? 0 : arrived);
	CHECK_EQ(stats_of(w).pages_copy_dropped, dropped);
}

/* Page 0 is nowhere, but may still become valid at the source. */
static void is_nowhere(struct world *w, uint32_t n)
{
	CHECK(!is_remote_valid(w, 0));
	if (is_pull(n))
		source_is(w, 0, stage_of(n) == READING && sent(w, SOURCE));
}

WORLD_CASES(a_write_wins, KINDS_STAGES, n, world_copying(n, 1))
{
	uint32_t id = put(w, 0, 1, 99);

	/* Its own transfer waits only for one that is on its way there. */
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	is_nowhere(w, n);
	goes_on(w, n);
	copies_are(w, n, 0, 1);
	is_nowhere(w, n);
	CHECK_EQ(w->error[id], PENDING);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	REPLY(w, TARGET, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET));
	CHECK_EQ(donor_value(w, TARGET, 0), 99);
	settle(w);
	CHECK_EQ(disk_value(w, 0), 99);
	CHECK_EQ(read_settled(w, 0), 99);
	copies_are(w, n, 0, 1);
}

/* Nothing of the write is left to be seen when the copy goes on, but for the page's version. */
WORLD_CASES(a_write_that_is_all_over_wins, KINDS_READING, n, world_copying(n, 1))
{
	uint32_t id = put(w, 0, 1, 99);

	REPLY(w, TARGET, 0);
	DISK_TAKE(w);
	DISK_DONE(w, !is_pull(n));
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET) && is_backup_current(w, 0));
	CHECK_EQ(stats_of(w).staging_pages_used, 1); /* the copy's */
	is_read(w, n);
	copies_are(w, n, 0, 1);
	CHECK_EQ(sent(w, TARGET), 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(donor_value(w, TARGET, 0), 99);
	CHECK_EQ(read_settled(w, 0), 99);
}

/* The same bytes, so that no checksum tells, and a donor that refused them. */
WORLD_CASES(a_write_of_the_same_bytes_wins, KINDS_READING, n, world_copying(n, 1))
{
	put(w, 0, 1, 10);
	REFUSE(w, TARGET, 0);
	is_read(w, n);
	copies_are(w, n, 0, 1);
	CHECK_EQ(sent(w, TARGET), 0);
	settle(w);
	CHECK(!is_remote_valid(w, 0));
	CHECK_EQ(read_settled(w, 0), 10);
}

WORLD_CASES(zeros_win, 2 * KINDS_STAGES, n, world_copying(n, 1))
{
	uint32_t op = n < KINDS_STAGES ? ISW_SIM_TRIM : ISW_SIM_ZERO;
	uint32_t id = submit(w, op, 0, 1, 0);

	CHECK_EQ(w->error[id], 0);
	is_nowhere(w, n);
	goes_on(w, n);
	copies_are(w, n, 0, 1);
	is_nowhere(w, n);
	CHECK(!is_backup_current(w, 0));
	CHECK_EQ(read_settled(w, 0), 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
}

WORLD_CASES(a_write_after_zeros_wins, KINDS_STAGES, n, world_copying(n, 1))
{
	trim(w, 0, 1);
	put(w, 0, 1, 99);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	goes_on(w, n);
	copies_are(w, n, 0, 1);
	CHECK(!is_remote_valid(w, 0));
	settle(w);
	CHECK_EQ(donor_value(w, TARGET, 0), 99);
	CHECK_EQ(disk_value(w, 0), 99);
	CHECK_EQ(read_settled(w, 0), 99);
}

/* A few pages of a run are overtaken, the others are copied. */
WORLD_CASES(the_rest_of_a_run_is_copied, KINDS_READING, n, world_copying(n, 6))
{
	trim(w, 1, 1);
	copies_are(w, n, 0, 0);
	is_read(w, n);
	CHECK_EQ(sent(w, TARGET), 2);
	put(w, 4, 1, 99);
	settle(w);
	copies_are(w, n, 4, 2);
	for (uint64_t page = 0; page < 6; page++) {
		CHECK_EQ(is_at(w, page, TARGET), page != 1);
		CHECK_EQ(read_settled(w, page), page == 1 ? 0 : page == 4 ? 99 : 10 + page);
	}
	if (is_pull(n))
		source_is(w, 0, 0);
}

/* A write that found no buffer goes on as soon as a copy gives some back, however it ends. */
WORLD_CASES(writes_go_on_with_the_buffers_of_copies, 3 * KINDS_READING, i,
	    world_copying(i % KINDS_READING, SLAB_PAGES))
{
	uint32_t n = i % KINDS_READING, way = i / KINDS_READING, id;

	put(w, SLAB_PAGES, 8, 100);
	id = put(w, 2 * SLAB_PAGES, 8, 200);
	CHECK_EQ(stats_of(w).staging_waits, 1);
	CHECK_EQ(stats_of(w).pages_out, SLAB_PAGES + 8);
	if (way)
		is_read(w, n);
	else if (is_pull(n))
		REFUSE(w, SOURCE, 0);
	else
		DISK_FAIL(w, 0);
	if (way == 1)
		REPLY(w, TARGET, 0);
	else if (way == 2)
		REFUSE(w, TARGET, 0);
	CHECK_EQ(stats_of(w).pages_out, SLAB_PAGES + 16);
	settle(w);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(read_settled(w, 2 * SLAB_PAGES), 200);
}

WORLD_CASES(a_copy_is_nothing_to_wait_for, KINDS_STAGES, n, world_copying(n, 1))
{
	struct isw_error error = {0};
	char path[64];
	uint32_t id;

	snprintf(path, sizeof(path), "isw-copy-%d.tables", (int)getpid());
	CHECK_EQ(isw_engine_settle(w->e, 0), 0);
	CHECK_EQ(isw_engine_save_tables(w->e, path, &error), 0);
	unlink(path);
	id = flush(w);
	DISK_TAKE(w);
	DISK_DONE(w, !is_pull(n) && stage_of(n) == READING); /* the sync */
	CHECK_EQ(w->error[id], 0);
	/* What is written meanwhile is. */
	put(w, 0, 1, 99);
	CHECK_EQ(isw_engine_settle(w->e, 0), -ETIMEDOUT);
	CHECK_EQ(isw_engine_save_tables(w->e, path, &error), -EBUSY);
	settle(w);
	CHECK_EQ(isw_engine_settle(w->e, 0), 0);
}
