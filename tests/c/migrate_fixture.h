/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of slabs that migrate share: worlds in which slab 0 has a source and a target. */
#ifndef ISW_TEST_MIGRATE_FIXTURE_H
#define ISW_TEST_MIGRATE_FIXTURE_H

#include "engine_fixture.h"

#define SOURCE 0u
#define TARGET 1u
#define THIRD  2u

/* ---------------------------------------------------------------------- control */

UNUSED_OK static int try_migrate(struct world *w, uint32_t slab, uint32_t remote)
{
	return isw_slab_migrate(w->e, slab, remote, slab, ++w->generations);
}

UNUSED_OK static void migrate(struct world *w, uint32_t slab, uint32_t remote)
{
	CHECK_EQ(try_migrate(w, slab, remote), 0);
}

UNUSED_OK static int pull_slab(struct world *w, uint32_t slab, uint32_t again)
{
	int code = isw_slab_pull(w->e, slab, slab_of(w, slab).generation, again);

	reap(w);
	return code;
}

/* Slab 0, from where the pass has come to. */
UNUSED_OK static int pull(struct world *w)
{
	return pull_slab(w, 0, 0);
}

/* To its end. */
UNUSED_OK static void pull_all(struct world *w)
{
	CHECK_EQ(pull(w), 0);
	settle(w);
}

/* From the start, to its end. */
UNUSED_OK static void pull_again(struct world *w)
{
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	settle(w);
}

UNUSED_OK static int leave_slab(struct world *w, uint32_t slab)
{
	struct isw_slab_info info = slab_of(w, slab);
	int code = isw_slab_unmap(w->e, slab, info.source_remote, info.source_generation);

	reap(w);
	return code;
}

/* Slab 0's source is given up. */
UNUSED_OK static void leave(struct world *w)
{
	CHECK_EQ(leave_slab(w, 0), 0);
}

UNUSED_OK static void resume_source(struct world *w)
{
	CHECK_EQ(isw_slab_resume(w->e, 0, slab_of(w, 0).source_remote,
				 slab_of(w, 0).source_generation),
		 0);
}

/* ---------------------------------------------------------------------- looking */

/* What isw_slab_pages_at says of slab 0's source. */
UNUSED_OK static void source_is(struct world *w, uint32_t pages, int more)
{
	struct isw_slab_info info = slab_of(w, 0);
	uint32_t got = 99;

	CHECK_EQ(isw_slab_pages_at(w->e, 0, info.source_remote, info.source_generation, &got),
		 more);
	CHECK_EQ(got, pages);
}

UNUSED_OK static bool is_at(const struct world *w, uint64_t page, uint32_t remote)
{
	uint32_t slab = (uint32_t)(page / w->e->slab_pages);

	return is_remote_valid(w, page) &&
	       iswi_place_remote(iswi_place(w->e, slab, iswi_place_at(w->e, page))) == remote;
}

UNUSED_OK static void migrated(const struct world *w, uint64_t pages, uint64_t dropped)
{
	CHECK_EQ(stats_of(w).pages_migrated, pages);
	CHECK_EQ(stats_of(w).pages_copy_dropped, dropped);
	CHECK_EQ(stats_of(w).pages_copied, 0);
}

/* DRAINED was reported once, of this donor. */
UNUSED_OK static void drained(const struct world *w, uint32_t remote, uint64_t generation)
{
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_DRAINED].slab, 0);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_DRAINED].remote, remote);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_DRAINED].generation, generation);
}

UNUSED_OK static void not_drained(const struct world *w)
{
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 0);
}

/* ----------------------------------------------------------------------- worlds */

UNUSED_OK static struct world *with_three(struct world *w)
{
	for (uint32_t remote = SOURCE; remote <= THIRD; remote++)
		CHECK_EQ(remote_new(w), remote);
	return w;
}

/* Of a source and a target only. */
UNUSED_OK static struct world *world_of_two(void)
{
	struct world *w = world_new(0);

	CHECK_EQ(remote_new(w), SOURCE);
	CHECK_EQ(remote_new(w), TARGET);
	return w;
}

/* `pages` pages of slab 0, page i holding 10 + i, are at its source (and on the backup). */
UNUSED_OK static struct world *world_moving(uint32_t flags, uint32_t pages)
{
	struct world *w = with_three(world_new(flags));

	map(w, 0, SOURCE);
	if (pages)
		write_settled(w, 0, pages, 10);
	migrate(w, 0, TARGET);
	return w;
}

/* The two moments at which something can come between. */
enum stage { READING, WRITING, STAGES };

/* So many pages are being pulled, in one run. */
UNUSED_OK static struct world *world_pulling(uint32_t flags, enum stage stage, uint32_t pages)
{
	struct world *w = world_moving(flags, pages);

	CHECK_EQ(pull(w), 0); /* the slab is not large */
	CHECK_EQ(sent(w, SOURCE), 1);
	CHECK_EQ(sent_for(w, SOURCE, 0, ISWI_XFER_READ), 1);
	if (stage == READING)
		return w;
	REPLY(w, SOURCE, 0);
	CHECK_EQ(sent(w, SOURCE), 0);
	CHECK_EQ(sent(w, TARGET), 1);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	return w;
}

/* The first transfer sent. */
UNUSED_OK static void pull_goes_on(struct world *w, enum stage stage)
{
	REPLY(w, stage == READING ? SOURCE : TARGET, 0);
}

/* A large slab on a device of its own, everything at the source. */
UNUSED_OK static struct world *world_large(uint32_t pages, uint32_t staging)
{
	struct world *w =
		with_three(WORLD_BUT(config.size_bytes = config.slab_bytes = pages * ISW_PAGE_BYTES;
				     config.staging_pages = staging));

	map(w, 0, SOURCE);
	for (uint64_t page = 0; page < pages; page += 8)
		write_settled(w, page, 8, 10 + page);
	migrate(w, 0, TARGET);
	return w;
}

/* Donor 0 has slab 0, and a write of page 0 is on its way there, which holds 20. */
UNUSED_OK static struct world *world_writing(uint32_t flags)
{
	struct world *w = with_three(world_new(flags));

	map(w, 0, SOURCE);
	write_settled(w, 0, 2, 10);
	put(w, 0, 1, 20);
	migrate(w, 0, TARGET);
	return w;
}

#endif
