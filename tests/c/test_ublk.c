// SPDX-License-Identifier: Apache-2.0
/*
 * The ublk front end without the kernel's half: what descriptors mean, how ended requests come
 * back to the ring's owner, and what a host without the driver is told. With the kernel:
 * tests/vm/test_ublk.py.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "isw.h"

#ifndef ISW_HAVE_UBLK

/* A build without it refuses, and says what to install. */
int main(void)
{
	struct isw_error error = {0};
	const struct isw_frontend_config config = {.identity = 1};
	isw_frontend *frontend = (isw_frontend *)&error;
	const char *missing;

	CHECK_EQ(strcmp(isw_frontend_kind(0, &missing), "ublk"), 0);
	CHECK(strstr(missing, "liburing-dev") != NULL);
	CHECK_EQ(isw_ublk_check(&error), -ENOSYS);
	CHECK(strstr(error.text, "liburing-dev") != NULL);
	CHECK_EQ(isw_frontend_start(NULL, "ublk", &config, &frontend, &error), -ENOSYS);
	CHECK(frontend == NULL);
	CHECK_EQ(isw_ublk_remove(0, 1, &error), -ENOSYS);
	return 0;
}

#else

#include "frontend/ublk_request.h"
#include "tests.h"

#define THREADS 4u
#define TAGS    64u
#define ROUNDS  2000u

static struct iswi_ublk_tag parsed(uint32_t op_flags, uint64_t sector, uint32_t sectors, int want)
{
	struct ublksrv_io_desc desc = {
		.op_flags = op_flags, .start_sector = sector, .nr_sectors = sectors};
	struct iswi_ublk_tag tag = {.number = 3};

	CHECK_EQ(iswi_ublk_parse(&desc, &tag), want);
	return tag;
}

TEST(descriptors_become_requests)
{
	struct iswi_ublk_tag tag = parsed(UBLK_IO_OP_READ, 8, 16, 0);

	CHECK_EQ(tag.req.op, ISWI_READ);
	CHECK_EQ(tag.req.offset, 4096);
	CHECK_EQ(tag.req.length, 8192);
	CHECK_EQ(tag.req.flags, 0);
	CHECK_EQ(parsed(UBLK_IO_OP_DISCARD, 0, 8, 0).req.op, ISWI_TRIM);
	CHECK_EQ(parsed(UBLK_IO_OP_WRITE_ZEROES | UBLK_IO_F_NOUNMAP, 0, 8, 0).req.op, ISWI_ZERO);
	/* Beyond 4 GiB, in sectors as in bytes. */
	tag = parsed(UBLK_IO_OP_WRITE, 1ull << 33, 8, 0);
	CHECK_EQ(tag.req.op, ISWI_WRITE);
	CHECK_EQ(tag.req.offset, 1ll << 42);
	tag = parsed(UBLK_IO_OP_DISCARD, 0, UINT32_MAX, 0);
	CHECK_EQ(tag.req.length, (uint64_t)UINT32_MAX * 512);
}

TEST(fua_is_forced_unit_access_and_nothing_else_is)
{
	CHECK_EQ(parsed(UBLK_IO_OP_WRITE | UBLK_IO_F_FUA, 0, 8, 0).req.flags, ISWI_REQ_FUA);
	CHECK_EQ(parsed(UBLK_IO_OP_WRITE | UBLK_IO_F_META | UBLK_IO_F_SWAP, 0, 8, 0).req.flags, 0);
}

TEST(a_flush_has_no_range)
{
	struct iswi_ublk_tag tag = parsed(UBLK_IO_OP_FLUSH, UINT64_MAX, 7, 0);

	CHECK_EQ(tag.req.op, ISWI_FLUSH);
	CHECK_EQ(tag.req.offset, 0);
	CHECK_EQ(tag.req.length, 0);
}

TEST(what_is_not_known_is_refused)
{
	parsed(UBLK_IO_OP_WRITE_SAME, 0, 8, -EOPNOTSUPP);
	parsed(0xff, 0, 8, -EOPNOTSUPP);
}

TEST(results_are_bytes_where_data_moves)
{
	struct iswi_req req = {.op = ISWI_READ, .length = 8192};

	CHECK_EQ(iswi_ublk_result(&req, 0), 8192);
	CHECK_EQ(iswi_ublk_result(&req, -EIO), -EIO);
	req.op = ISWI_TRIM;
	CHECK_EQ(iswi_ublk_result(&req, 0), 0);
}

TEST(ended_requests_come_oldest_first_and_are_announced_once)
{
	struct iswi_ublk_ended ended = {0};
	struct iswi_ublk_tag tags[3] = {0};
	struct iswi_ublk_tag *tag;

	CHECK(iswi_ublk_ended_take(&ended) == NULL);
	CHECK(iswi_ublk_ended_push(&ended, &tags[0]));
	CHECK(!iswi_ublk_ended_push(&ended, &tags[1]));
	CHECK(!iswi_ublk_ended_push(&ended, &tags[2]));
	tag = iswi_ublk_ended_take(&ended);
	for (int i = 0; i < 3; i++, tag = tag->next)
		CHECK(tag == &tags[i]);
	CHECK(tag == NULL);
	CHECK(iswi_ublk_ended_push(&ended, &tags[1]));
	CHECK(iswi_ublk_ended_take(&ended) == &tags[1]);
}

/* Engine threads: each ends its own tags again and again, once the owner has given them back. */
static struct {
	struct iswi_ublk_ended ended;
	struct iswi_ublk_tag tags[THREADS][TAGS];
	atomic_uint given[THREADS][TAGS]; /* with the owner's release of the tag's contents */
	atomic_ulong announced;
} race;

static void *end_requests(void *arg)
{
	const uintptr_t me = (uintptr_t)arg;

	for (uint32_t round = 1; round <= ROUNDS; round++) {
		for (uint32_t i = 0; i < TAGS; i++) {
			struct iswi_ublk_tag *tag = &race.tags[me][i];

			while (atomic_load_explicit(&race.given[me][i], memory_order_acquire) !=
			       round - 1)
				sched_yield();
			tag->result = (int32_t)round;
			if (iswi_ublk_ended_push(&race.ended, tag))
				atomic_fetch_add(&race.announced, 1);
		}
	}
	return NULL;
}

/* None is lost, none comes twice, and there are as many announcements as batches. */
TEST(no_request_is_lost_between_threads)
{
	pthread_t threads[THREADS];
	unsigned long taken = 0, batches = 0;

	for (uintptr_t t = 0; t < THREADS; t++) {
		for (uint16_t i = 0; i < TAGS; i++)
			race.tags[t][i].number = (uint16_t)(t * TAGS + i);
		CHECK_EQ(pthread_create(&threads[t], NULL, end_requests, (void *)t), 0);
	}
	while (taken < (unsigned long)THREADS * TAGS * ROUNDS) {
		struct iswi_ublk_tag *tag = iswi_ublk_ended_take(&race.ended);

		if (tag == NULL) {
			sched_yield();
			continue;
		}
		batches++;
		while (tag != NULL) {
			struct iswi_ublk_tag *next = tag->next;
			atomic_uint *given = &race.given[tag->number / TAGS][tag->number % TAGS];

			CHECK_EQ(tag->result, atomic_load(given) + 1);
			atomic_store_explicit(given, (unsigned int)tag->result,
					      memory_order_release);
			taken++;
			tag = next;
		}
	}
	for (uint32_t t = 0; t < THREADS; t++)
		CHECK_EQ(pthread_join(threads[t], NULL), 0);
	CHECK(iswi_ublk_ended_take(&race.ended) == NULL);
	CHECK_EQ(atomic_load(&race.announced), batches);
}

TEST(a_host_without_the_driver_is_told_what_to_do)
{
	struct isw_error error = {0};
	int err = isw_ublk_check(&error);

	if (access("/dev/ublk-control", F_OK) == 0)
		return; /* it has it; or nearly */
	CHECK(err == -ENODEV || err == -EOPNOTSUPP);
	CHECK(strstr(error.text, err == -ENODEV ? "modprobe ublk_drv" : "Linux 6.5") != NULL);
	CHECK_EQ(isw_ublk_remove(0, 1, &error), err);
}

#endif
