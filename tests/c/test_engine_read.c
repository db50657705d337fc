/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of reading: one function each, every event ordered by hand. */
#include "engine_fixture.h"

WORLD_TEST(reads_prefer_staging, world_mapped(0))
{
	put(w, 1, 1, 100);
	put(w, 1, 1, 200);
	GOT(w, get(w, 1, 1), 200);
	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_READ), 0);
	/* Also when the donor has it: staged is nearer. */
	remotes_settle(w);
	CHECK(is_remote_valid(w, 1));
	GOT(w, get(w, 1, 1), 200);
	CHECK_EQ(stats_of(w).pages_in_staging, 2);
}

WORLD_TEST(then_the_donor_then_the_backup, world_holding(0, 1, 1, 100))
{
	uint32_t id = get(w, 1, 1);

	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_READ), 1);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_TAKE, 1, 0), 0);
	READ_ENDS(w, id, 100);
	CHECK_EQ(stats_of(w).pages_in_remote, 1);
	unmap(w);
	id = get(w, 1, 1);
	CHECK_EQ(sent(w, 0), 0);
	DISK_READ(w);
	CHECK_EQ(w->got[id][0], 100);
	CHECK_EQ(stats_of(w).pages_in_backup, 1);
}

WORLD_TEST(one_request_gathers_every_source, world_mapped(0))
{
	static const uint64_t values[8] = {0, 101, 0, 104, 105, 106};
	uint32_t id;

	write_settled(w, 1, 1, 101); /* donor */
	put(w, 3, 1, 104);
	REFUSE(w, 0, 0); /* backup only */
	settle(w);
	put(w, 4, 2, 105); /* staged */
	id = get(w, 0, 8);
	CHECK_EQ(w->error[id], PENDING);
	END_WELL(w, id);
	CHECK(!memcmp(w->got[id], values, sizeof(values)));
	sources_are(w, 1, 1, 2);
	CHECK_EQ(stats_of(w).pages_in_zero, 4);
}

WORLD_TEST(fallbacks_are_counted_by_their_reason, world_holding(0, 1, 1, 100))
{
	BREAK(w, 0);
	CHECK_EQ(read_settled(w, 1), 100);
	CHECK_EQ(stats_of(w).fallback_suspended, 1);
	unmap(w);
	CHECK_EQ(read_settled(w, 1), 100);
	CHECK_EQ(stats_of(w).fallback_unmapped, 1);
	reconnect(w, 0);
	map(w, 0, 0);
	CHECK_EQ(read_settled(w, 1), 100);
	CHECK_EQ(stats_of(w).fallback_invalid, 1);
	CHECK_EQ(stats_of(w).fallback_error, 0);
}

WORLD_TEST(a_write_that_passes_a_read_spoils_nothing, world_holding(0, 1, 1, 100))
{
	uint32_t id = get(w, 1, 1);

	APPLY(w, 0, 0); /* the read has the old bytes */
	put(w, 1, 1, 200);
	REPLY(w, 0, 0);
	/* Either would be right; what is not is a page that fits no checksum. */
	GOT(w, id, 200);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 0);
	settle(w);
	CHECK(is_remote_valid(w, 1));
}

WORLD_TEST(a_backup_read_that_a_write_passed_is_not_blamed, world_new(0))
{
	uint32_t id;

	write_settled(w, 1, 1, 100);
	id = get(w, 1, 1);
	DISK_TAKE_READ(w);
	put(w, 1, 1, 200);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_DONE, 0, 0), 1);
	GOT(w, id, 200);
	CHECK_EQ(stats_of(w).crc_errors_backup, 0);
}

/* Writes that come and are everywhere while a read of what was before is on its way. */
WORLD_TEST(a_page_rewritten_during_each_read_is_not_blamed_on_anyone, world_holding(0, 1, 1, 100))
{
	uint32_t id = get(w, 1, 1);

	for (uint32_t round = 0; round < 3; round++) {
		APPLY(w, 0, 0);
		put(w, 1, 1, 200 + round);
		REPLY(w, 0, 1);
		disk_settle(w);
		CHECK_EQ(stats_of(w).staging_pages_used, 0);
		REPLY(w, 0, 0);
		CHECK_EQ(w->error[id], PENDING);
		CHECK_EQ(stats_of(w).crc_errors_remote, 0);
	}
	REPLY(w, 0, 0);
	GOT(w, id, 202);
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 0);
	CHECK(is_remote_valid(w, 1));
}

WORLD_TEST(garbage_from_a_donor_does_not_pass_for_a_page, world_holding(0, 1, 1, 100))
{
	uint32_t id = get(w, 1, 1);

	CORRUPT(w, 0, 0);
	CHECK_EQ(w->error[id], PENDING);
	CORRUPT(w, 0, 0); /* asked again, wrong again */
	CHECK_EQ(w->error[id], PENDING);
	CHECK_EQ(stats_of(w).crc_errors_remote, 1);
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 1);
	CHECK_EQ(w->last[ISW_EVENT_BAD_PAGE].slab, 0);
	CHECK_EQ(w->last[ISW_EVENT_BAD_PAGE].value, 1);
	CHECK(!is_remote_valid(w, 1));
	DISK_READ(w);
	GOT(w, id, 100);
	CHECK_EQ(stats_of(w).fallback_error, 1);
	CHECK_EQ(stats_of(w).pages_in_remote, 0);
	id = get(w, 1, 1);
	CHECK_EQ(sent(w, 0), 0); /* not believed again */
}

WORLD_TEST(garbage_in_one_page_costs_only_that_page, world_holding(0, 0, 8, 100))
{
	uint32_t id = get(w, 0, 8);

	CORRUPT(w, 0, 0); /* in the middle: page 4 */
	CHECK_EQ(sent(w, 0), 1);
	CHECK_EQ(sent_for(w, 0, 4, ISWI_XFER_READ), 1);
	CORRUPT(w, 0, 0);
	END_WELL(w, id);
	for (uint32_t i = 0; i < 8; i++) {
		CHECK_EQ(w->got[id][i], 100 + i);
		CHECK_EQ(is_remote_valid(w, i), i != 4);
	}
	CHECK_EQ(stats_of(w).pages_in_remote, 7);
	CHECK_EQ(stats_of(w).pages_in_backup, 1);
}

WORLD_TEST(the_only_copy_gone_bad_is_an_error_never_zeros,
	   world_holding(ISW_ENGINE_NO_BACKUP, 1, 1, 100))
{
	uint32_t id;

	for (int i = 0; i < 2; i++) {
		id = get(w, 1, 1);
		CORRUPT(w, 0, 0);
		CORRUPT(w, 0, 0);
		CHECK_EQ(w->error[id], -EIO);
	}
	CHECK_EQ(stats_of(w).crc_errors_remote, 2);
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 2);
	/* It may have been the way and not the copy. */
	CHECK_EQ(read_settled(w, 1), 100);
}

WORLD_TEST(garbage_on_the_disk_is_an_error_never_zeros, world_new(0))
{
	write_settled(w, 1, 1, 100);
	iswi_sim_of(w->e)->disk[ISW_PAGE_BYTES + 99] ^= 1;
	for (int i = 1; i <= 2; i++) {
		CHECK_EQ(read_settled(w, 1), -EIO);
		CHECK_EQ(stats_of(w).crc_errors_backup, i);
	}
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 2);
	iswi_sim_of(w->e)->disk[ISW_PAGE_BYTES + 99] ^= 1;
	CHECK_EQ(read_settled(w, 1), 100);
}

WORLD_CASES(a_failed_remote_read_goes_to_the_backup, 2, dies, world_holding(0, 1, 1, 100))
{
	uint32_t id = get(w, 1, 1);

	if (dies)
		BREAK(w, 0);
	else
		REFUSE(w, 0, 0);
	CHECK_EQ(w->error[id], PENDING);
	DISK_READ(w);
	GOT(w, id, 100);
	CHECK_EQ(stats_of(w).fallback_error, 1);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_ERROR], !dies);
	CHECK_EQ(w->events[ISW_EVENT_REMOTE_DOWN], dies);
}

WORLD_TEST(when_every_copy_fails_it_is_an_error, world_holding(0, 1, 1, 100))
{
	uint32_t id, fine;

	write_settled(w, 2, 1, 200);
	id = get(w, 1, 1);
	fine = get(w, 2, 1);
	REFUSE(w, 0, 0);
	DISK_TAKE_READ(w);
	DISK_FAIL(w, 0);
	CHECK_EQ(w->error[id], -EIO);
	CHECK_EQ(w->error[fine], PENDING);
	READ_ENDS(w, fine, 200);
	/* The next read tries both again. */
	CHECK_EQ(read_settled(w, 1), 100);
	CHECK_EQ(stats_of(w).requests_failed, 1);
}

WORLD_TEST(a_failed_backup_read_asks_the_donor, world_holding(0, 1, 1, 100))
{
	uint32_t id;

	BREAK(w, 0);
	id = get(w, 1, 1);
	DISK_TAKE_READ(w);
	donor_returns(w, 0);
	DISK_FAIL(w, 0);
	CHECK_EQ(w->error[id], PENDING); /* no error while any copy exists */
	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_READ), 1);
	REPLY(w, 0, 0);
	GOT(w, id, 100);
}

WORLD_TEST(a_page_is_read_anew_when_staging_overtook_it, world_holding(0, 1, 1, 100))
{
	uint32_t id = get(w, 1, 1);

	put(w, 1, 1, 200);
	REFUSE(w, 0, 0); /* the read; meanwhile the page is staged */
	GOT(w, id, 200);
}

/* Each buffer in a slow remote write, each request a read: no transfer may be missing. */
WORLD_TEST(reads_are_tried_anew_with_every_transfer_in_use,
	   WORLD_BUT(config.requests_max = 1; config.request_bytes_max = ISW_PAGE_BYTES))
{
	uint32_t id;

	remote_new(w);
	for (uint32_t slab = 0; slab < 3; slab++)
		map(w, slab, 0);
	write_settled(w, 16, 1, 100);
	for (uint32_t page = 0; page < STAGING; page++) {
		put(w, page, 1, 200 + page);
		disk_settle(w);
	}
	CHECK_EQ(sent(w, 0), STAGING);
	id = get(w, 16, 1);
	CHECK_EQ(sent(w, 0), STAGING + 1);
	REFUSE(w, 0, STAGING);
	DISK_READ(w);
	GOT(w, id, 100);
}
