/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Far memory in the engine. F22: what its requests may take, and that block requests get the rest.
 * F5: that its reads say whether a page is lost or only out of reach.
 */
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include "state_fixture.h"

#define FAR_PAGES  16u /* the last two slabs */
#define FAR_STAGED (STAGING - STAGING / 4)
#define ASKED_MAX  40u

struct asked {
	struct iswi_req req;
	int answers, error;
};

static unsigned char data[ISW_PAGE_BYTES] __attribute__((aligned(4096)));

static void answered(struct iswi_req *req, int error)
{
	struct asked *asked = ISWI_CONTAINER(req, struct asked, req);

	asked->answers++;
	asked->error = error;
}

static struct asked asked_of(enum iswi_req_op op, uint32_t page, uint32_t pages, uint32_t flags)
{
	return (struct asked){
		.req =
			{
				.op = op,
				.flags = flags,
				.offset = page * ISW_PAGE_BYTES,
				.length = pages * ISW_PAGE_BYTES,
				.data = data,
				.done = answered,
			},
	};
}

static void ask(struct world *w, struct asked *asked, enum iswi_req_op op, uint32_t page,
		uint32_t flags)
{
	*asked = asked_of(op, page, 1, flags);
	iswi_engine_submit(w->e, &asked->req);
}

static void put_one(struct world *w, struct asked *asked, uint32_t page, uint32_t flags)
{
	ask(w, asked, ISWI_WRITE, page, flags);
}

#define FAR_WORLD WORLD_BUT(config.far_bytes = FAR_PAGES * ISW_PAGE_BYTES; config.requests_max = 2)

/* Of its pages of staging far memory fills its own part; a block device's write still finds one. */
WORLD_TEST(a_full_part_of_far_memory_leaves_block_writes_theirs, FAR_WORLD)
{
	static struct asked far[FAR_PAGES], block[2];
	uint32_t first = PAGES - FAR_PAGES;

	for (uint32_t i = 0; i < FAR_PAGES; i++)
		put_one(w, &far[i], first + i, ISWI_REQ_FAR);
	CHECK_EQ(stats_of(w).staging_pages_used, FAR_STAGED);
	CHECK_EQ(stats_of(w).staging_waits, FAR_PAGES - FAR_STAGED);
	put_one(w, &block[0], 0, 0);
	put_one(w, &block[1], 1, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, FAR_STAGED + 2);
	CHECK_EQ(stats_of(w).staging_waits, FAR_PAGES - FAR_STAGED);
	settle(w);
	for (uint32_t i = 0; i < FAR_PAGES; i++) {
		CHECK_EQ(far[i].answers, 1);
		CHECK_EQ(far[i].error, 0);
	}
	CHECK_EQ(block[0].answers + block[1].answers, 2);
	CHECK_EQ(w->e->staging_alloc.far, 0);
}

/* Requests of far memory do not count among those that a block device may have in flight. */
WORLD_TEST(block_requests_are_not_refused_for_far_ones, FAR_WORLD)
{
	static struct asked far[4], block[3];

	for (uint32_t i = 0; i < 4; i++)
		put_one(w, &far[i], PAGES - FAR_PAGES + i, ISWI_REQ_FAR);
	for (uint32_t i = 0; i < 3; i++)
		put_one(w, &block[i], i, 0);
	CHECK_EQ(block[0].answers + block[1].answers, 0);
	CHECK_EQ(block[2].error, -EBUSY); /* of its own kind there are two */
	settle(w);
	CHECK_EQ(block[0].error | block[1].error, 0);
}

#define ENDED_MAX 300000u

static void *trim_far_pages(void *world)
{
	struct asked asked;

	for (uint32_t i = 0; i < ENDED_MAX; i++) {
		ask(world, &asked, ISWI_TRIM, PAGES - 1, ISWI_REQ_FAR);
		CHECK_EQ(asked.error, 0);
	}
	return NULL;
}

/* An error of swap would be the end of whoever waits for the page. */
WORLD_TEST(a_block_request_is_not_refused_as_far_ones_end,
	   WORLD_BUT(config.far_bytes = FAR_PAGES * ISW_PAGE_BYTES; config.requests_max = 1))
{
	struct asked asked;
	pthread_t other;

	CHECK_EQ(pthread_create(&other, NULL, trim_far_pages, w), 0);
	for (uint32_t i = 0; i < ENDED_MAX; i++) {
		ask(w, &asked, ISWI_TRIM, 0, 0);
		CHECK_EQ(asked.error, 0);
	}
	CHECK_EQ(pthread_join(other, NULL), 0);
}

/* What is far stays so: else block devices would find their part of staging taken. */
WORLD_TEST(what_a_successor_finds_staged_counts_as_far,
	   WORLD_BUT(config.far_bytes = FAR_PAGES * ISW_PAGE_BYTES))
{
	static struct asked far[FAR_PAGES], block;
	struct world *s;

	for (uint32_t i = 0; i < FAR_STAGED; i++)
		put_one(w, &far[i], PAGES - FAR_PAGES + i, ISWI_REQ_FAR);
	put_one(w, &block, 0, 0);
	s = successor(w);
	CHECK_EQ(s->e->staging_alloc.far, FAR_STAGED);
	CHECK_EQ(stats_of(s).staging_pages_used, FAR_STAGED + 1);
	put_one(s, &far[FAR_STAGED], PAGES - 1, ISWI_REQ_FAR);
	CHECK_EQ(stats_of(s).staging_pages_used, FAR_STAGED + 1);
	settle(s);
	CHECK_EQ(s->e->staging_alloc.far, 0);
}

/* Of one that had more than this one would give. */
WORLD_TEST(a_successor_bears_more_far_pages_than_it_gives, FAR_WORLD)
{
	static struct asked far;

	w->e->staging_alloc.far = FAR_STAGED + 1;
	put_one(w, &far, PAGES - 1, ISWI_REQ_FAR);
	CHECK_EQ(far.answers, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	w->e->staging_alloc.far = 0;
	iswi_write_kick(w->e);
	settle(w);
	CHECK_EQ(far.answers, 1);
}

/* Far memory ends with its jobs; what an earlier start has left there is nobody's. */
TEST(a_start_forgets_what_was_far)
{
	struct world *before = FAR_WORLD, *w = FAR_WORLD;
	char path[] = "/tmp/isw-far-tables-XXXXXX";
	struct asked asked;

	close(mkstemp(path));
	put_one(before, &asked, PAGES - 1, ISWI_REQ_FAR);
	write_settled(before, 0, 1, 100);
	CHECK_EQ(isw_engine_save_tables(before->e, path, NULL), 0);
	memcpy(iswi_sim_of(w->e)->disk, iswi_sim_of(before->e)->disk, PAGES * ISW_PAGE_BYTES);
	CHECK_EQ(isw_engine_load_tables(w->e, path, NULL), 0);
	CHECK(is_backup_current(before, PAGES - 1) && !is_backup_current(w, PAGES - 1));
	CHECK_EQ(read_settled(w, 0), 100);
	unlink(path);
	world_end(before);
	world_end(w);
}

WORLD_TEST(neither_range_is_reached_from_the_other, FAR_WORLD)
{
	struct asked asked;

	for (enum iswi_req_op op = ISWI_READ; op <= ISWI_ZERO; op++) {
		ask(w, &asked, op, PAGES - FAR_PAGES, 0);
		CHECK_EQ(asked.error, -ENOSPC);
		ask(w, &asked, op, PAGES - FAR_PAGES - 1, ISWI_REQ_FAR);
		CHECK_EQ(asked.error, -ENOSPC);
		ask(w, &asked, op, PAGES, ISWI_REQ_FAR);
		CHECK_EQ(asked.error, -ENOSPC);
	}
}

/* A job's end empties whole slabs: none has pages of both. */
WORLD_TEST(the_far_range_begins_at_a_slab,
	   WORLD_BUT(config.far_bytes = (FAR_PAGES + 3) * ISW_PAGE_BYTES))
{
	struct asked asked;

	CHECK_EQ(iswi_engine_size_bytes(w->e), (PAGES - FAR_PAGES - 3) * ISW_PAGE_BYTES);
	CHECK_EQ(iswi_engine_far_offset(w->e), (PAGES - FAR_PAGES) * ISW_PAGE_BYTES);
	CHECK_EQ(iswi_engine_far_bytes(w->e), FAR_PAGES * ISW_PAGE_BYTES);
	for (uint32_t page = PAGES - FAR_PAGES - 3; page < PAGES - FAR_PAGES; page++) {
		ask(w, &asked, ISWI_READ, page, 0);
		CHECK_EQ(asked.error, -ENOSPC);
		ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
		CHECK_EQ(asked.error, -ENOSPC);
	}
	ask(w, &asked, ISWI_READ, PAGES - FAR_PAGES, ISWI_REQ_FAR);
	CHECK(asked.answers == 1 && asked.error == 0);
	ask(w, &asked, ISWI_READ, PAGES - FAR_PAGES - 4, 0);
	CHECK(asked.answers == 1 && asked.error == 0);
}

static const struct iswi_transport_ops *unwatched;
static const struct iswi_queue *went_over;

static void watched_submit(struct iswi_queue *queue, struct iswi_xfer *first)
{
	went_over = queue;
	unwatched->submit(queue, first);
}

static struct iswi_queue **watch_queues(struct world *w, uint32_t remote)
{
	static struct iswi_transport_ops watched;
	struct iswi_remote *r = &w->e->remotes[remote];

	unwatched = r->queues[0]->ops;
	watched = *unwatched;
	watched.submit = watched_submit;
	for (uint32_t i = 0; i < r->queues_count; i++)
		r->queues[i]->ops = &watched;
	return r->queues;
}

/* Of one page each. */
WORLD_TEST(a_far_read_goes_behind_no_far_write, FAR_WORLD)
{
	uint32_t remote = remote_new(w), page = PAGES - SLAB_PAGES;
	struct iswi_queue **queues = watch_queues(w, remote);
	struct asked asked;

	map(w, SLABS - 1, remote);
	map(w, 0, remote);
	put_one(w, &asked, page, ISWI_REQ_FAR);
	CHECK(went_over == queues[1]);
	settle(w);
	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	CHECK(went_over == queues[0]);
	settle(w);
	put_one(w, &asked, 0, 0);
	CHECK(went_over == queues[0]); /* what belongs to a block device keeps its order */
	settle(w);
}

/*
 * Agents read ahead themselves. One page after the other of the slab before far memory, or of far
 * memory; each was written by such a request.
 */
static void read_slab(struct world *w, uint32_t first, uint32_t flags)
{
	struct asked asked;

	for (uint32_t page = first; page < first + SLAB_PAGES; page++) {
		put_one(w, &asked, page, flags);
		settle(w);
	}
	for (uint32_t page = first; page < first + SLAB_PAGES; page++) {
		ask(w, &asked, ISWI_READ, page, flags);
		settle(w);
		CHECK(asked.answers == 1 && asked.error == 0);
	}
}

WORLD_TEST(nothing_of_far_memory_is_read_ahead,
	   WORLD_BUT(config.far_bytes = FAR_PAGES * ISW_PAGE_BYTES;
		     config.flags = ISW_ENGINE_READ_AHEAD))
{
	uint32_t remote = remote_new(w), far_page = PAGES - FAR_PAGES;

	map(w, far_page / SLAB_PAGES, remote);
	map(w, far_page / SLAB_PAGES - 1, remote);
	read_slab(w, far_page, ISWI_REQ_FAR);
	CHECK_EQ(stats_of(w).pages_ahead, 0);
	read_slab(w, far_page - SLAB_PAGES, 0);
	CHECK(stats_of(w).pages_ahead > 0 && stats_of(w).pages_ahead < SLAB_PAGES);
}

/* Where nothing has a page any more far memory is told so: it must not take it for a failure. */
WORLD_TEST(a_lost_page_is_told_from_a_failed_read,
	   WORLD_BUT(config.far_bytes = FAR_PAGES * ISW_PAGE_BYTES;
		     config.flags = ISW_ENGINE_NO_BACKUP))
{
	uint32_t remote = remote_new(w), page = PAGES - SLAB_PAGES;
	uint64_t generation = map(w, SLABS - 1, remote);
	struct asked asked;

	put_one(w, &asked, page, ISWI_REQ_FAR);
	settle(w);
	CHECK_EQ(asked.error, 0);
	BREAK(w, remote);
	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	CHECK_EQ(asked.error, -EIO); /* its donor may come back */
	CHECK_EQ(isw_slab_unmap(w->e, SLABS - 1, remote, generation), 0);
	settle(w);
	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	CHECK_EQ(asked.error, -ENODATA);
}

static int confirm(struct world *w, uint32_t page, uint32_t pages)
{
	struct asked asked = asked_of(ISWI_CONFIRM, page, pages, ISWI_REQ_FAR);

	iswi_engine_submit(w->e, &asked.req);
	CHECK_EQ(asked.answers, 1); /* it never waits */
	return asked.error;
}

/* F15: a copy at home may go where this is 0. */
WORLD_TEST(what_can_be_read_now_is_confirmed,
	   WORLD_BUT(config.far_bytes = FAR_PAGES * ISW_PAGE_BYTES;
		     config.flags = ISW_ENGINE_NO_BACKUP))
{
	uint32_t remote = remote_new(w), page = PAGES - SLAB_PAGES;
	uint64_t generation = map(w, SLABS - 1, remote);
	struct asked asked;

	CHECK_EQ(confirm(w, page, SLAB_PAGES), 0); /* zeros */
	put_one(w, &asked, page + 1, ISWI_REQ_FAR);
	CHECK_EQ(confirm(w, page, SLAB_PAGES), 0); /* staged */
	settle(w);
	CHECK_EQ(confirm(w, page, SLAB_PAGES), 0);
	BREAK(w, remote);
	CHECK_EQ(confirm(w, page, SLAB_PAGES), -EIO); /* it may come back, and may not */
	CHECK_EQ(confirm(w, page, 1), 0);
	CHECK_EQ(confirm(w, page - SLAB_PAGES, 2 * SLAB_PAGES), -EIO);
	CHECK_EQ(isw_slab_unmap(w->e, SLABS - 1, remote, generation), 0);
	settle(w);
	CHECK_EQ(confirm(w, page, SLAB_PAGES), -EIO);
	ask(w, &asked, ISWI_TRIM, page + 1, ISWI_REQ_FAR);
	CHECK_EQ(confirm(w, page, SLAB_PAGES), 0);
}

static int read_far(struct world *w, uint32_t page)
{
	struct asked asked;

	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	settle(w);
	CHECK_EQ(asked.answers, 1);
	return asked.error;
}

/* A far page that a donor and the disk have. */
static uint32_t far_page_everywhere(struct world *w)
{
	uint32_t remote = remote_new(w), page = PAGES - SLAB_PAGES;
	struct asked asked;

	map(w, SLABS - 1, remote);
	put_one(w, &asked, page, ISWI_REQ_FAR);
	settle(w);
	CHECK_EQ(asked.error, 0);
	CHECK(is_remote_valid(w, page) && is_backup_current(w, page));
	return page;
}

WORLD_TEST(what_the_backup_has_is_confirmed_without_donors, FAR_WORLD)
{
	uint32_t page = far_page_everywhere(w);

	BREAK(w, 0);
	CHECK_EQ(confirm(w, page, 1), 0);
}

static void read_opened(struct world *w, uint32_t page, unsigned char byte)
{
	static unsigned char opened[ISW_PAGE_BYTES];
	unsigned char expected[ISW_PAGE_BYTES];
	struct asked asked = asked_of(ISWI_READ, page, 1, ISWI_REQ_FAR);

	asked.req.opened = opened;
	memset(data, 0, sizeof(data));
	memset(opened, 99, sizeof(opened));
	memset(expected, byte, sizeof(expected));
	iswi_engine_submit(w->e, &asked.req);
	settle(w);
	CHECK(asked.answers == 1 && asked.error == 0);
	CHECK(memcmp(opened, expected, sizeof(opened)) == 0);
}

static struct {
	struct iswi_shard *shard;
	unsigned char *memory;
	int faults, locked;
} others;

static void fault_of_others(int signal)
{
	(void)signal;
	others.faults++;
	if (pthread_mutex_trylock(&others.shard->lock) == 0)
		pthread_mutex_unlock(&others.shard->lock);
	else
		others.locked++;
	mprotect(others.memory, ISW_PAGE_BYTES, PROT_READ | PROT_WRITE);
}

/* A client has made a hole there, and who writes waits for its memory. */
WORLD_TEST(nobody_waits_for_a_clients_memory_with_a_lock, FAR_WORLD)
{
	uint32_t page = PAGES - SLAB_PAGES;
	struct asked asked, read = asked_of(ISWI_READ, page, 1, ISWI_REQ_FAR);

	others.shard = iswi_shard_of(w->e, page);
	others.memory = mmap(NULL, ISW_PAGE_BYTES, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(others.memory != MAP_FAILED);
	CHECK(signal(SIGSEGV, fault_of_others) != SIG_ERR);
	put_one(w, &asked, page, ISWI_REQ_FAR);
	read.req.opened = others.memory;
	iswi_engine_submit(w->e, &read.req);
	CHECK(read.answers == 1 && read.error == 0);
	CHECK_EQ(others.faults, 1);
	CHECK_EQ(others.locked, 0);
	settle(w);
	CHECK(signal(SIGSEGV, SIG_DFL) != SIG_ERR);
	munmap(others.memory, ISW_PAGE_BYTES);
}

WORLD_TEST(pages_come_where_they_are_opened, FAR_WORLD)
{
	uint32_t remote = remote_new(w), page = PAGES - SLAB_PAGES;
	struct asked asked;

	map(w, SLABS - 1, remote);
	read_opened(w, page, 0);
	memset(data, 5, sizeof(data));
	put_one(w, &asked, page, ISWI_REQ_FAR);
	read_opened(w, page, 5); /* staged */
	settle(w);
	read_opened(w, page, 5);
	BREAK(w, remote);
	read_opened(w, page, 5); /* from the disk */
	memset(data, 0, sizeof(data));
}

static void spoil_disk(struct world *w, uint32_t page)
{
	iswi_sim_of(w->e)->disk[page * ISW_PAGE_BYTES + 99] ^= 1;
}

/* Who waits for a page that nothing will ever have would wait for ever. */
WORLD_TEST(a_page_is_lost_when_every_source_gives_other_bytes, FAR_WORLD)
{
	uint32_t page = far_page_everywhere(w);
	struct asked asked;

	spoil_disk(w, page);
	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	CORRUPT(w, 0, 0);
	CORRUPT(w, 0, 0);
	settle(w);
	CHECK_EQ(asked.error, -ENODATA);
	CHECK_EQ(read_far(w, page), -ENODATA); /* the disk alone is asked now */
	ask(w, &asked, ISWI_READ, page, 0);
	CHECK_EQ(asked.error, -ENOSPC);
}

/* It may be its newest version that passed by, or the way and not the copy. */
WORLD_TEST(a_page_that_one_source_has_is_not_lost, FAR_WORLD)
{
	uint32_t page = far_page_everywhere(w);
	struct asked asked;

	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	CORRUPT(w, 0, 0);
	CORRUPT(w, 0, 0);
	settle(w);
	CHECK_EQ(asked.error, 0);
	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	DISK_TAKE_READ(w);
	DISK_FAIL(w, 0);
	settle(w);
	CHECK_EQ(asked.error, -EIO); /* the disk may answer the next time */
	CHECK_EQ(read_far(w, page), 0);
}

/* A donor that is away may have it, whatever the disk says. */
WORLD_TEST(a_page_of_a_donor_that_is_away_is_not_lost, FAR_WORLD)
{
	uint32_t page = far_page_everywhere(w);

	spoil_disk(w, page);
	BREAK(w, 0);
	CHECK_EQ(read_far(w, page), -EIO);
	reconnect(w, 0);
	resume(w, SLABS - 1);
	CHECK_EQ(read_far(w, page), 0);
}

WORLD_TEST(a_page_that_the_medium_has_lost_is_lost, FAR_WORLD)
{
	uint32_t page = PAGES - 1;
	struct asked asked;

	put_one(w, &asked, page, ISWI_REQ_FAR);
	settle(w);
	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	DISK_TAKE_READ(w);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_FAIL, 1, 0), 1);
	CHECK_EQ(asked.error, -ENODATA);
	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	DISK_TAKE_READ(w);
	DISK_FAIL(w, 0);
	CHECK_EQ(asked.error, -EIO);
}

/* Without a backup the donor's copy is the only one. */
WORLD_TEST(an_only_copy_that_is_damaged_is_lost,
	   WORLD_BUT(config.far_bytes = FAR_PAGES * ISW_PAGE_BYTES;
		     config.flags = ISW_ENGINE_NO_BACKUP))
{
	uint32_t remote = remote_new(w), page = PAGES - SLAB_PAGES;
	struct asked asked;

	map(w, SLABS - 1, remote);
	put_one(w, &asked, page, ISWI_REQ_FAR);
	settle(w);
	ask(w, &asked, ISWI_READ, page, ISWI_REQ_FAR);
	CORRUPT(w, remote, 0);
	CORRUPT(w, remote, 0);
	CHECK_EQ(asked.error, -ENODATA);
}
