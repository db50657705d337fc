/* SPDX-License-Identifier: Apache-2.0 */
/* F22: what requests of far memory may take of the engine, and that block requests get the rest. */
#include "engine_fixture.h"

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

static void ask(struct world *w, struct asked *asked, enum iswi_req_op op, uint32_t page,
		uint32_t flags)
{
	*asked = (struct asked){
		.req =
			{
				.op = op,
				.flags = flags,
				.offset = page * ISW_PAGE_BYTES,
				.length = ISW_PAGE_BYTES,
				.data = data,
				.done = answered,
			},
	};
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
