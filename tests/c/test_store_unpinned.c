// SPDX-License-Identifier: Apache-2.0
/* A donor that may not lock memory lends it all the same, and says so. */
#define _GNU_SOURCE 1
#include <sys/resource.h>
#include <unistd.h>

#include "store_fixture.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define NO_MLOCK 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define NO_MLOCK 1
#endif

TEST(test_a_donor_that_may_not_lock_memory_lends_it_and_says_so)
{
	const struct rlimit none = {0};
	struct leased leased;
	char page[4096];
	int fd;

#ifdef NO_MLOCK
	SKIP("needs a build without sanitizers: they make mlock do nothing");
#endif
	CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, &none), 0);
	/* The limit does not hold for root. */
	if (geteuid() == 0)
		CHECK_EQ(setresuid(65534, 65534, 65534), 0);
	set_up(4u << 20, 2);
	CHECK_EQ(store_stats().slabs_free, 2);
	CHECK_EQ(store_stats().slabs_unpinned, 2);
	leased = lease_slots(1);
	map_slab(leased.lease);
	fd = open_export(port, leased.ticket);
	CHECK_EQ(do_read(fd, (4u << 20) - 4096, page, sizeof(page)), 0);
	CHECK(all_bytes(page, 0, sizeof(page)));
	close(fd);
	CHECK_EQ(isw_store_release_free(store), 0);
	CHECK_EQ(store_stats().slabs_unpinned, 1);
	tear_down();
}
